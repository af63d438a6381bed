"""The turn in progress: a generator that its caller may have abandoned. It is closed before anything else starts."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from inspect import GEN_RUNNING, getgeneratorstate
from typing import TypeVar

_Events = TypeVar("_Events", bound=Generator[object, None, None])


class ActiveTurn:
    """Holds a generator of events and those that it runs itself, by weak references."""

    def __init__(self) -> None:
        self._nested: list[weakref.ref[Generator[object, None, None]]] = []

    def start(self, events: _Events) -> _Events:
        """Close the current generator and replace it by `events`. If it is running, `events` are part of it."""
        self.close()
        self._nested.append(weakref.ref(events))
        return events

    def close(self) -> None:
        """Close the current generator, as if its caller had done so. One that is running goes on."""
        running = []
        for reference in self._nested:
            events = reference()
            if events is not None and getgeneratorstate(events) == GEN_RUNNING:
                running.append(reference)
            elif events is not None:
                events.close()
        self._nested = running
