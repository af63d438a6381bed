"""What all head groups of a cache share: the count of tokens, and a number that says whether bound addresses hold."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

_MIN_REACH = 256


class TokenCount:
    """How many tokens a stream has seen.

    The count stays the same during a forward, while one layer after another takes the new tokens, and advances once
    all of them have. A forward that is cut off halfway is not counted.

    Attributes:
        lengths: tokens of each row without padding; empty before the first forward.
        columns: columns fed, padding included: what `generate` counts with.
        reach: a power of two above the tokens of every row, after the forward that is expected; doubles with them. So
            many distances can occur, which is what tables by distance are made for.
    """

    def __init__(self, revision: Revision | None = None) -> None:
        self.lengths: tuple[int, ...] = ()
        self.columns, self.reach = 0, _MIN_REACH
        self._expected: tuple[Sequence[int], int] = (), 0
        self._revision = revision or Revision()

    def expect(self, counts: Sequence[int], columns: int) -> None:
        """Announce the tokens of a forward: `counts` of each row, in so many columns."""
        self._expected = counts, columns
        reach = 1 << (max(self.lengths, default=0) + max(counts)).bit_length()
        if reach > self.reach:
            self.reach = reach
            self._revision.bump()

    def advance(self) -> None:
        """Count the tokens of the forward that was expected."""
        counts, columns = self._expected
        self.lengths = tuple(map(add, self.lengths, counts)) if self.lengths else tuple(counts)
        self.columns += columns

    def select_rows(self, rows: Sequence[int]) -> None:
        """Row i becomes a copy of row `rows[i]`."""
        self.lengths = tuple(self.lengths[row] for row in rows)

    def reset(self) -> None:
        """Start a new stream."""
        self.lengths, self.columns = (), 0


class Revision:
    """Grows whenever a tensor of a cache is allocated or released, when a window, pin, span or row changes, or when a
    stream is about to become twice as long.

    Addresses and rules that native code has bound stay valid as long as the number stays the same.
    """

    def __init__(self) -> None:
        self.number = 0

    def bump(self) -> None:
        """Invalidate everything bound so far."""
        self.number += 1
