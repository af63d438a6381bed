"""Standard streams that work even if the caller closed them or the terminal is gone."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from typing import Any

_NAMES = ("stdin", "stdout", "stderr")

TERMINATION_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that terminate a program by default: a request to exit, or a closed terminal."""


def prepare_stdio() -> None:
    """Open missing standard streams, and replace characters that an output cannot encode.

    If the caller closed one (``2>&-``), stdin is empty, stderr is discarded, and stdout is a pipe without a reader.
    """
    for number, name in enumerate(_NAMES):
        if getattr(sys, name) is None:
            _open(number)
            stream: Any = os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8")
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        if number and isinstance(stream := getattr(sys, name), TextIOWrapper):
            stream.reconfigure(errors="replace")


def _open(number: int) -> None:
    if number == 1:
        read_end, descriptor = os.pipe()
        os.close(read_end)
    else:
        descriptor = os.open(os.devnull, os.O_RDWR)
    if descriptor != number:
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.set_inheritable(number, True)


def discard_output(only_terminals: bool = False) -> None:
    """Discard further output, because nobody reads it: all, or only that to terminals."""
    devnull = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        with suppress(OSError):
            if not only_terminals or stat.S_ISCHR(
                os.fstat(number).st_mode
            ):  # a terminal that hung up is no longer a tty
                os.dup2(devnull, number)
    os.close(devnull)


def handle_termination(handle: Callable[[int], None]) -> dict[int, Any]:
    """Install a handler for `TERMINATION_SIGNALS`, except for ignored ones (``nohup``), and return the previous ones.

    It is called with the number of the signal; output to a closed terminal is discarded from then on.
    """

    def handler(number: int, frame: object) -> None:
        if number == getattr(signal, "SIGHUP", None):
            discard_output(only_terminals=True)
        handle(number)

    handled = [number for number in TERMINATION_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in handled}
