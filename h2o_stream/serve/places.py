"""Places of which there are so many, and who is next where one becomes free."""

from __future__ import annotations

import asyncio
from collections import deque


class Places:
    """So many places, in the thread of an event loop. Those who wait come one after another, whoever has waited
    longest first; those of one asker wait for each other, not for those of others.

    Attributes:
        free: number of places that nobody has.
    """

    def __init__(self, count: int) -> None:
        self.free, self._queues = count, dict[str, deque[asyncio.Future[None]]]()

    async def take(self, asker: str) -> None:
        """Wait for a place."""
        if self.free > 0:
            self.free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(asker, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self.leave()
            elif place in (queue := self._queues.get(asker, deque())):
                queue.remove(place)
                if not queue:
                    del self._queues[asker]
            raise

    def leave(self) -> None:
        """Let the next one have a place."""
        while self._queues:
            asker = next(iter(self._queues))
            queue = self._queues.pop(asker)
            place = queue.popleft()
            if queue:
                self._queues[asker] = queue
            if not place.done():  # else its client is leaving
                place.set_result(None)
                return
        self.free += 1

    @property
    def crowded(self) -> bool:
        """Whether anybody waits."""
        return bool(self._queues)
