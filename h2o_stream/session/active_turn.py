"""The turn under way: an iterator that its caller may have left, and that is closed before anything else begins."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from typing import TypeVar

_Events = TypeVar("_Events", bound=Generator[object, None, None])


class Running:
    """At most one iterator of events. It is not kept alive."""

    def __init__(self) -> None:
        self._events: weakref.ref[Generator[object, None, None]] | None = None

    def begin(self, events: _Events) -> _Events:
        """Close what was under way and take `events` in its place."""
        self.end()
        self._events = weakref.ref(events)
        return events

    def end(self) -> None:
        """Close what is under way, as if its caller had."""
        events = self._events() if self._events is not None else None
        if events is not None:
            events.close()
