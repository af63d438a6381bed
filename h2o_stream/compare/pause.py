"""Holds back the signals that end a comparison until the job in progress has kept what it has done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from h2o_stream.base.stdio import TERMINATION_SIGNALS


class Pause:
    """Inside the block, the first signal that would end the program waits for `end`, while `keeps` is true.

    Any other does what it did before. `on_signal` is called when one waits.
    """

    def __init__(self, on_signal: Callable[[], None] = lambda: None) -> None:
        self.keeps = False
        self._on_signal = on_signal
        self._waiting: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for number in (signal.SIGINT, *TERMINATION_SIGNALS):
                if callable(signal.getsignal(number)):
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def requested(self) -> bool:
        """Whether a signal waits."""
        return self._waiting is not None

    def end(self) -> None:
        """Do what the waiting signal does."""
        assert self._waiting is not None
        self._previous[self._waiting](self._waiting, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.keeps and not self.requested:
            self._waiting = number
            self._on_signal()
        else:
            self._previous[number](number, frame)
