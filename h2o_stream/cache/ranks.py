"""The integers that hold ranks; imports no torch."""

from __future__ import annotations


def rank_dtype(slots: int) -> str:
    """The smallest signed type for the ranks in that many slots: at most twice their number, while they fill up."""
    return "int16" if 2 * slots < 2**15 else "int32"
