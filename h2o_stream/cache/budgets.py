"""How the slots are shared out among the layers: windows of different size, equal in the mean.

Until the window is full all layers hold everything; then those that reach far (`cache.reach`) grow by what the others
give up, and the total is at any moment what equal windows would hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise


def windows(shares: Sequence[float], window: int, pinned: int, least: int, most: int | None) -> list[int]:
    """The windows of the layers, `window` in the mean. Pinned tokens are in every layer, the rest is shared.

    Args:
        shares: see `measure`.
        window: tokens per layer.
        pinned: of them never evicted.
        least: tokens beside the pinned ones that every layer needs.
        most: the largest window there may be, at least `window`; None for no limit. Where it or `least` binds, all
            shares move toward 1.
    """
    movable, low, high = window - pinned, min(shares), max(shares)
    part = 1.0
    if low < 1:
        part = min(part, max(movable - least, 0) / (movable * (1 - low)))
    if most is not None and high > 1:
        part = min(part, (most - window) / (movable * (high - 1)))
    return _whole([pinned + movable * (1 + part * (share - 1)) for share in shares])


@dataclass(frozen=True)
class Schedule:
    """How many tokens one layer holds of a stream.

    Attributes:
        common: every layer holds everything up to here.
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
        """Whether the layer never changes its size."""
        return self.window == self.common

    @property
    def settled(self) -> int:
        """The length of a stream from which on the layer holds `window`."""
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
def schedules(windows: tuple[int, ...], common: int) -> list[Schedule]:
    """From equal windows to those given: what the far-reaching layers cannot fill yet is left to the others."""
    if set(windows) == {common}:
        return [Schedule.equal(common)] * len(windows)
    growing = [max(window - common, 0) for window in windows]
    rows = []
    for seen in range(common + 1, max(windows)):
        unused = sum(max(common + more - seen, 0) for more in growing) / sum(growing)
        rows.append(_whole([min(seen, window + max(common - window, 0) * unused) for window in windows]))
    columns = zip(*rows, strict=True) if rows else [()] * len(windows)
    return [
        Schedule.equal(common) if window == common else Schedule(common, column, window)
        for column, window in zip(columns, windows, strict=True)
    ]


def _whole(numbers: Sequence[float]) -> list[int]:
    """Whole numbers of the same sum, each less than 1 away."""
    ends = [round(end + 1e-9) for end in accumulate(numbers, initial=0.0)]
    return [after - before for before, after in pairwise(ends)]
