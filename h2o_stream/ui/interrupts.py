"""Turns Ctrl-C, a closed terminal and SIGTERM into a flag, rather than an exception in the middle of a step."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any, Self

from h2o_stream.base.stdio import handle_termination

DOUBLE_PRESS_S = 2.0
"""A second Ctrl-C within this time interrupts immediately."""


class Interrupts:
    """Inside the block, the first Ctrl-C sets `requested`. A second one soon after raises KeyboardInterrupt.

    A signal that ends the program sets it, too, and is sent again where the block ends.
    """

    def __init__(self) -> None:
        self.requested = False
        self._last = float("-inf")
        self._waiting: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self.requested = False
        self._previous = handle_termination(self._terminate)
        self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            signal.raise_signal(waiting)

    def __call__(self) -> bool:
        """Whether the current turn should stop."""
        return self.requested

    def _terminate(self, number: int) -> None:
        self.requested, self._waiting = True, number

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested and now - self._last < DOUBLE_PRESS_S:
            raise KeyboardInterrupt
        self.requested, self._last = True, now
