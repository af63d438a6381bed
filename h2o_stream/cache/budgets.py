"""How the slots are shared out among the heads: windows of different size, equal in the mean.

Until the window is full all heads hold everything; then those that reach far (`cache.retrieval_heads`) grow by what the others
give up, and the total is at any moment what equal windows would hold, less a rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache


@dataclass(frozen=True)
class HeadBudget:
    """KV heads of a layer that have windows of one size.

    Attributes:
        heads: their numbers; empty for all heads of a layer.
        share: their part of the slots, 1 in the mean over all heads.
    """

    heads: tuple[int, ...] = ()
    share: float = 1.0

    @property
    def count(self) -> int:
        """How many; all heads of a layer count as one, for where they stand so, all layers are alike."""
        return len(self.heads) or 1


def windows(groups: Sequence[HeadBudget], window: int, pinned: int, least: int, most: int | None = None) -> list[int]:
    """The windows of groups of heads, `window` in the mean over heads. Every head has the pinned tokens.

    Args:
        groups: who shares.
        window: tokens per head.
        pinned: of them never evicted.
        least: tokens beside the pinned ones that every head needs.
        most: the largest window there may be, at least `window`; None for no limit. Where it or `least` binds, all
            shares move toward 1.
    """
    shares = [group.share for group in groups]
    movable, low, high = window - pinned, min(shares), max(shares)
    part = 1.0
    if low < 1:
        part = min(part, max(movable - least, 0) / (movable * (1 - low)))
    if most is not None and high > 1:
        part = min(part, (most - window) / (movable * (high - 1)))
    return _whole([pinned + movable * (1 + part * (share - 1)) for share in shares], [group.count for group in groups])


@dataclass(frozen=True)
class Schedule:
    """How many tokens a group of heads holds of a stream.

    Attributes:
        common: every head holds everything up to here.
        between: what it holds of streams of ``common + 1``, ``common + 2``, ... tokens, until it holds `window`.
        window: what it holds from then on.
    """

    common: int
    between: tuple[int, ...]
    window: int

    @classmethod
    def equal(cls, window: int) -> Schedule:
        """The same from the first token to the last."""
        return cls(window, (), window)

    @property
    def fixed(self) -> bool:
        """Whether the window never changes its size."""
        return self.window == self.common

    @cached_property
    def settled(self) -> int:
        """The length of a stream from which on `window` tokens are held."""
        return self.common + len(self.between) + 1

    @property
    def most(self) -> int:
        """The most it ever holds."""
        return max(self.common, self.window)

    def held(self, seen: int) -> int:
        """Tokens held of a stream of `seen`."""
        if seen <= self.common:
            return seen
        return self.between[seen - self.common - 1] if seen < self.settled else self.window


@lru_cache
def schedules(windows: tuple[int, ...], counts: tuple[int, ...], common: int) -> list[Schedule]:
    """From equal windows to those given: what the far-reaching heads cannot fill yet is left to the others.

    Args:
        windows: of every group of heads, in the end.
        counts: heads of every group.
        common: the mean window.
    """
    if set(windows) == {common}:
        return [Schedule.equal(common)] * len(windows)
    growing = [count * max(window - common, 0) for window, count in zip(windows, counts, strict=True)]
    rows = []
    for seen in range(common + 1, max(windows)):
        unfilled = sum(count * max(window - seen, 0) for window, count in zip(windows, counts, strict=True))
        left = unfilled / sum(growing)
        rows.append(_whole([min(seen, window + max(common - window, 0) * left) for window in windows], counts))
    columns = zip(*rows, strict=True) if rows else [()] * len(windows)
    return [
        Schedule.equal(common) if window == common else Schedule(common, column, window)
        for column, window in zip(columns, windows, strict=True)
    ]


def _whole(numbers: Sequence[float], counts: Sequence[int]) -> list[int]:
    """Whole numbers less than 1 away, and of the same sum as far as they can be, each counted `counts` times."""
    whole, owed = [], 0.0
    for number, count in zip(numbers, counts, strict=True):
        whole.append(math.floor(number + min(owed / count, 0.999) + 1e-6))
        owed += count * (number - whole[-1])
    return whole
