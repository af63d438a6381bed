"""The turn in progress: a generator that its caller may have abandoned. It is closed before anything else starts."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from typing import TypeVar

_Events = TypeVar("_Events", bound=Generator[object, None, None])


class ActiveTurn:
    """Holds at most one generator of events, by a weak reference."""

    def __init__(self) -> None:
        self._events: weakref.ref[Generator[object, None, None]] | None = None

    def start(self, events: _Events) -> _Events:
        """Close the current generator and replace it by `events`."""
        self.close()
        self._events = weakref.ref(events)
        return events

    def close(self) -> None:
        """Close the current generator, as if its caller had done so."""
        events = self._events() if self._events is not None else None
        if events is not None:
            events.close()
