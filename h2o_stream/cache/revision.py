"""A number that says whether addresses and rules that native code has bound are still valid."""

from __future__ import annotations


class Revision:
    """Grows whenever a tensor of a cache is allocated or released, or when a window, pin, budget, span or row changes.

    All head groups of a cache share one. What was bound stays valid as long as the number stays the same.
    """

    def __init__(self) -> None:
        self.number = 0

    def bump(self) -> None:
        """Invalidate everything bound so far."""
        self.number += 1
