"""What all head groups of a cache share: the count of tokens, and a number that says whether bound addresses hold."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

_MIN_LENGTH = 1024


def doubled(length: int) -> int:
    """A power of two that is larger, the same for all lengths up to about twice this one."""
    return 1 << max(length, _MIN_LENGTH).bit_length()


class TokenCount:
    """How many tokens a stream has seen.

    The count stays the same during a forward, while one layer after another takes the new tokens, and advances once
    all of them have. A forward that is cut off halfway is not counted.

    Args:
        revision: grows when the stream has become about twice as long: tables by distance may be too short then.

    Attributes:
        lengths: tokens of each row without padding; empty before the first forward.
        columns: columns fed, padding included: what `generate` counts with.
    """

    def __init__(self, revision: Revision | None = None) -> None:
        self.lengths: tuple[int, ...] = ()
        self.columns = 0
        self._revision = revision or Revision()

    def advance(self, counts: Sequence[int], columns: int) -> None:
        """Count the tokens of a forward: `counts` of each row, in so many columns."""
        before = max(self.lengths, default=0)
        self.lengths = tuple(map(add, self.lengths, counts)) if self.lengths else tuple(counts)
        if doubled(before) != doubled(max(self.lengths)):
            self._revision.bump()
        self.columns += columns

    def select_rows(self, rows: Sequence[int]) -> None:
        """Row i becomes a copy of row `rows[i]`."""
        self.lengths = tuple(self.lengths[row] for row in rows)

    def reset(self) -> None:
        """Start a new stream."""
        self.lengths, self.columns = (), 0


class Revision:
    """Grows whenever a tensor of a cache is allocated or released, when a window, pin, span or row changes, or when a
    stream has become about twice as long.

    Addresses and rules that native code has bound stay valid as long as the number stays the same.
    """

    def __init__(self) -> None:
        self.number = 0

    def bump(self) -> None:
        """Invalidate everything bound so far."""
        self.number += 1
