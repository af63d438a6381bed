"""Where the tokens of a stream are, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from h2o_stream.cache.group_rules import GroupRules
from h2o_stream.cache.windows import Schedule


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
        grown: slots of the window that were added for what is pinned.
    """

    seen: int
    cached: int
    sinks: int
    pinned: int
    heavy: int
    recent: int
    window: int
    nbytes: int
    grown: int = 0

    @property
    def evicted(self) -> int:
        """Tokens no longer held."""
        return self.seen - self.cached

    @property
    def window_text(self) -> str:
        """The window as it was given, and by how much it has grown: 256 + 410. Empty without a window."""
        grown = f" + {self.grown:,}" if self.grown else ""
        return f"{self.window - self.grown:,}{grown}" if self.window else ""

    @property
    def window_note(self) -> str:
        """The window with the reason why it has grown: 256 + 410 for what is pinned."""
        return self.window_text + " for what is pinned" * (self.grown > 0)

    @property
    def free(self) -> int:
        """Slots not used yet."""
        return max(self.window - self.cached, 0)


@dataclass(frozen=True)
class Occupancy:
    """How many tokens the layers that evict hold, at any length of a stream; valid for one revision of the cache.

    Attributes:
        window: tokens that a head holds in the mean.
        grown: how many of them were added for what is pinned.
        protected: token indices that are never evicted, sinks and pins.
        groups: weight of the head groups, by schedule and number of protected recent tokens.
    """

    revision: int
    window: int
    grown: int
    nbytes: int
    sinks: int
    protected: tuple[range, ...]
    groups: dict[tuple[Schedule, int], int]

    @classmethod
    def of(
        cls, groups: Sequence[GroupRules], protected: tuple[range, ...], grown: int, revision: int, nbytes: int
    ) -> Occupancy:
        """The occupancy of the head groups that evict, as they are now; see above for the rest."""
        weights = Counter[tuple[Schedule, int]]()
        for group in groups:
            weights[group.schedule, group.protection.recent] += group.weight
        plan = groups[0].plan
        return cls(revision, plan.window, grown, nbytes, plan.sinks, protected, dict(weights))

    def counts(self, seen: int) -> CacheCounts:
        """Means over the heads, of a stream of `seen` tokens."""
        means = self._final if seen >= self._constant_from else self._numbers(seen)
        return CacheCounts(seen, *means, self.window, self.nbytes, self.grown)

    @cached_property
    def _constant_from(self) -> int:
        """The length of a stream from which on nothing but the length changes."""
        return max(*(schedule.settled for schedule, _ in self.groups), *(pin.stop for pin in self.protected), 0)

    @cached_property
    def _final(self) -> tuple[int, int, int, int, int]:
        return self._numbers(self._constant_from)

    def _numbers(self, seen: int) -> tuple[int, int, int, int, int]:
        """Tokens cached, and of them sinks, pinned, heavy and recent ones."""
        protected = sum(len(pin[: max(seen - pin.start, 0)]) for pin in self.protected)
        sinks = min(self.sinks, seen)
        capacities = [schedule.held(seen) for schedule, _ in self.groups]
        newest = [min(recent, now - protected) for (_, recent), now in zip(self.groups, capacities, strict=True)]
        heads = list(self.groups.values())
        cached, recent = (round(fmean(numbers, heads)) for numbers in (capacities, newest))
        return cached, sinks, protected - sinks, cached - protected - recent, recent
