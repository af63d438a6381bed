"""Ctrl-C as a wish, not as an exception in the middle of a step."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any, Self

TWICE_S = 2.0
"""A second Ctrl-C within this time does not wait any longer."""


class Interrupts:
    """Inside the block the first Ctrl-C sets `requested`; a second one soon after raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False
        self._last = float("-inf")
        self._previous: Any = None

    def __enter__(self) -> Self:
        self.requested = False
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def __call__(self) -> bool:
        """Whether Ctrl-C was pressed since the block was entered."""
        return self.requested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested and now - self._last < TWICE_S:
            raise KeyboardInterrupt
        self.requested, self._last = True, now
