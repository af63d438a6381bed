"""Where the tokens of a stream are, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheCounts:
    """Where the tokens of a stream are. All but `seen` and `evicted` are per layer and KV head.

    Attributes:
        seen: tokens fed since the start.
        cached: tokens held, ``sinks + pinned + heavy + recent``.
        sinks: first tokens of the stream, never evicted.
        pinned: further tokens that are never evicted, such as the system prompt.
        heavy: held for the attention they got.
        recent: held because they are new.
        window: slots there are; 0 means no limit.
        nbytes: memory of keys, values and bookkeeping, all layers.
    """

    seen: int
    cached: int
    sinks: int
    pinned: int
    heavy: int
    recent: int
    window: int
    nbytes: int

    @property
    def evicted(self) -> int:
        """Tokens no longer held."""
        return self.seen - self.cached

    @property
    def free(self) -> int:
        """Slots not used yet."""
        return max(self.window - self.cached, 0)
