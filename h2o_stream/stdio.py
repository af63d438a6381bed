"""The three standard streams: there whatever the caller closed, and gone without a word when the terminal is."""

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
"""Signals that end a program which does not ignore them: it is asked to leave, or its terminal is closed."""


def prepare_stdio() -> None:
    """Have all three standard streams, and question marks for letters that an output cannot show.

    Of those that the caller has closed (``2>&-``) the input is an empty one, notes go nowhere, and the output is a
    pipe that nobody reads.
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
        reading, opened = os.pipe()
        os.close(reading)
    else:
        opened = os.open(os.devnull, os.O_RDWR)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    os.set_inheritable(number, True)


def discard_output(only_terminals: bool = False) -> None:
    """Let what is still written go nowhere, because nobody reads it any more.

    Args:
        only_terminals: leave files and pipes as they are.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        with suppress(OSError):
            if not only_terminals or stat.S_ISCHR(os.fstat(number).st_mode):  # one that hung up is no tty any more
                os.dup2(nowhere, number)
    os.close(nowhere)


def handle_termination(handle: Callable[[int], None]) -> dict[int, Any]:
    """Have the signals of `TERMINATION_SIGNALS` handled, those that the caller ignores (``nohup``) left out.

    Args:
        handle: gets the signal's number; what is written to a closed terminal from then on goes nowhere.

    Returns:
        The handlers there were, by signal.
    """

    def ended(number: int, frame: object) -> None:
        if number == getattr(signal, "SIGHUP", None):
            discard_output(only_terminals=True)
        handle(number)

    heard = [number for number in TERMINATION_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, ended) for number in heard}
