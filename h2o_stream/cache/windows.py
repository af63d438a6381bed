"""Windows of different size for the heads of a model, equal in the mean.

Until the window is full all heads hold everything. Then retrieval heads (`attachment.retrieval_heads`) grow by what the
others give up. That happens in stages, so that slots are allocated anew only a few times: when one begins, the others
give up what retrieval heads will take until it ends. So at no time is more allocated than for equal windows.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy
from numpy.typing import NDArray

_STAGE = 1.25
"""Length of a stream at the end of a stage, relative to its beginning."""

_STAGED, _FIRST_STAGE = 1 << 16, 256
"""Equal windows above this are allocated in stages while the stream grows; the length at the end of the first."""


@dataclass(frozen=True)
class HeadWindow:
    """KV heads of a layer that share a window size.

    Attributes:
        heads: their indices; empty for all heads of a layer.
    """

    heads: tuple[int, ...] = ()
    share: float = 1.0

    @property
    def weight(self) -> int:
        """Weight in means over heads: its heads; 1 for a whole layer, because all are then alike."""
        return len(self.heads) or 1


def windows(
    groups: Sequence[HeadWindow], window: int, pinned: int, minimum: int, max_window: int | None = None
) -> list[int]:
    """The windows of groups of heads, `window` in the mean over heads. Every head has the pinned tokens.

    Args:
        groups: heads with the share of a window that each wants.
        window: mean number of tokens per head.
        pinned: how many of them are never evicted.
        minimum: tokens beside the pinned ones that every head needs.
        max_window: largest window, at least `window`; None for no limit. Where it or `minimum` binds, all shares move
            toward 1.
    """
    shares = [group.share for group in groups]
    movable, low, high = window - pinned, min(shares), max(shares)
    strength = 1.0
    if low < 1:
        strength = min(strength, max(movable - minimum, 0) / (movable * (1 - low)))
    if max_window is not None and high > 1:
        strength = min(strength, (max_window - window) / (movable * (high - 1)))
    sizes = [pinned + movable * (1 + strength * (share - 1)) for share in shares]
    return [int(size) for size in _rounded(sizes, [group.weight for group in groups])]


@dataclass(frozen=True)
class Schedule:
    """Number of tokens that a group of heads holds of a stream.

    Attributes:
        common: streams up to this length are held entirely, by every head.
        between: tokens held of streams of ``common + 1``, ``common + 2``, ... tokens, until it holds `window`.
        window: tokens held from then on.
        stages: lengths at which a stage ends; without them, slots are allocated for the most tokens.
        evicted: tokens that had been evicted when the window grew; all that come later are held until it is full.
    """

    common: int
    between: tuple[int, ...]
    window: int
    stages: tuple[int, ...] = ()
    evicted: int = 0

    @classmethod
    def equal(cls, window: int) -> Schedule:
        """A schedule of the same window from the first token to the last."""
        if window <= _STAGED:
            return cls(window, (), window)
        stages = [_FIRST_STAGE]
        while stages[-1] < window:
            stages.append(min(math.ceil(stages[-1] * _STAGE), window))
        return cls(window, (), window, tuple(stages))

    def grown(self, more: int, evicted: int) -> Schedule:
        """This schedule with `more` slots, for a stream that has evicted tokens; see above."""
        common = self.common + more if self.fixed else self.common
        between = tuple(window + more for window in self.between)
        return Schedule(common, between, self.window + more, self.stages, evicted)

    @property
    def fixed(self) -> bool:
        """Whether the window never changes its size."""
        return self.window == self.common

    @cached_property
    def settled(self) -> int:
        """The length of a stream from which on `window` tokens are held."""
        return max(self.common + len(self.between) + 1, self.evicted + self.window)

    @property
    def max_held(self) -> int:
        """Largest number of tokens it ever holds."""
        return max(self.common, self.window)

    def max_held_in_stage(self, seen: int) -> int:
        """Largest number of tokens held in the stage of a stream of `seen`; within `common`, that many."""
        if not self.stages:
            return self.max_held
        end = self.stages[min(bisect_left(self.stages, seen), len(self.stages) - 1)]
        return end if end < self.common else self._limit(end)

    def held(self, seen: int) -> int:
        """Tokens held of a stream of `seen`."""
        return min(seen - self.evicted, self._limit(seen))

    def _limit(self, seen: int) -> int:
        """Tokens that there is room for, whether so many are left or not."""
        number = seen - self.common - 1
        if number < 0:
            return self.common
        return self.between[number] if number < len(self.between) else self.window

    def num_evictions(self, seen: int) -> int:
        """Number of evictions caused by the next token of a stream of `seen`."""
        return 1 if seen >= self.settled else self.held(seen) + 1 - self.held(seen + 1)


@lru_cache
def schedules(windows: tuple[int, ...], weights: tuple[int, ...], common: int) -> list[Schedule]:
    """From equal windows to `windows`: slots that growing heads cannot fill yet are left to the others.

    Args:
        windows: final size for each group of heads.
        weights: weights of the groups in means over heads.
        common: mean window.
    """
    if set(windows) == {common}:
        return [Schedule.equal(common)] * len(windows)
    growing = [weight * max(window - common, 0) for window, weight in zip(windows, weights, strict=True)]
    stages = [common]
    columns: list[list[int]] = [[] for _ in windows]
    while stages[-1] < max(windows):
        stages.append(min(math.ceil(stages[-1] * _STAGE), max(windows)))
        unfilled = sum(weight * max(window - stages[-1], 0) for window, weight in zip(windows, weights, strict=True))
        unfilled_share = unfilled / sum(growing)
        seen = numpy.arange(stages[-2] + 1, min(stages[-1] + 1, max(windows)))
        counts = [numpy.minimum(seen, window + max(common - window, 0) * unfilled_share) for window in windows]
        for column, values in zip(columns, _rounded(counts, weights), strict=True):
            column += values.tolist()
    return [
        Schedule.equal(common) if window == common else Schedule(common, tuple(column), window, tuple(stages))
        for column, window in zip(columns, windows, strict=True)
    ]


def _rounded(numbers: Sequence[Any], weights: Sequence[int]) -> list[NDArray[numpy.int64]]:
    """Integers less than 1 away with the same sum, as far as possible; each number weights `weights` times.

    The numbers may be arrays of equal shape, whose elements are rounded independently.
    """
    whole, owed = list[NDArray[numpy.int64]](), numpy.float64(0)
    for number, weight in zip(numbers, weights, strict=True):
        whole.append(numpy.floor(number + numpy.minimum(owed / weight, 0.999) + 1e-6).astype(numpy.int64))
        owed = owed + weight * (number - whole[-1])
    return whole
