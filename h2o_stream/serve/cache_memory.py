"""The memory that the caches of a server share."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

from h2o_stream.base.memory import format_bytes
from h2o_stream.serve.errors import ApiError
from h2o_stream.serve.stream import WaitingEngine

_SHARE = 0.75
"""Of the memory that is free when the server starts, for caches."""


class CacheMemory:
    """Counts what caches take when they are full, of the memory that is free.

    Attributes:
        limit: bytes of all of them.
        sizes: windows and bytes of the caches, when they were counted last.
    """

    def __init__(self, free_bytes: int) -> None:
        self.limit, self.sizes = free_bytes * _SHARE, WeakKeyDictionary[WaitingEngine, tuple[int, int]]()

    def reserve(self, engine: WaitingEngine, make_room: Callable[[], bool]) -> None:
        """Count a cache that is new, or has grown; `make_room` puts a conversation to sleep, if one is idle.

        Raises:
            ApiError: it does not fit beside the others.
        """
        self.release(engine)
        size = engine.cache.allocated_bytes()
        while (used := self._used()) + size > self.limit and used:
            if not make_room():
                raise ApiError(503, "the caches of others take all memory", code="busy", retry_after_s=2)
        if size > self.limit:
            message = f"a cache of {format_bytes(size)} is larger than the memory of this server; use a smaller window"
            raise ApiError(400, message, "window")
        self.sizes[engine] = engine.cache.plan.window, size

    def release(self, engine: WaitingEngine) -> None:
        """Count a cache no more."""
        self.sizes.pop(engine, None)

    def _used(self) -> int:
        """Bytes of all caches. Their windows may have grown for what is pinned since they were counted."""
        for engine, (window, _) in [*self.sizes.items()]:
            if engine.cache.plan.window != window:
                self.sizes[engine] = engine.cache.plan.window, engine.cache.allocated_bytes()
        return sum(size for _, size in self.sizes.values())
