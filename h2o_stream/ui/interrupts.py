"""Ctrl-C as a wish, not as an exception in the middle of a step; and so are a closed terminal and SIGTERM."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any, Self

from h2o_stream.stdio import handle_termination

TWICE_S = 2.0
"""A second Ctrl-C within this time does not wait any longer."""


class Interrupts:
    """Inside the block the first Ctrl-C sets `requested`; a second one soon after raises KeyboardInterrupt.

    Attributes:
        requested: whether what is going on should stop.
        ended: whether the program was asked to end, too.
    """

    def __init__(self) -> None:
        self.requested = self.ended = False
        self._last = float("-inf")
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self.requested = False
        self._previous = handle_termination(self._end)
        self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, before in self._previous.items():
            signal.signal(number, before)

    def __call__(self) -> bool:
        """Whether Ctrl-C was pressed since the block was entered."""
        return self.requested

    def _end(self, number: int) -> None:
        self.requested = self.ended = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested and now - self._last < TWICE_S:
            raise KeyboardInterrupt
        self.requested, self._last = True, now
