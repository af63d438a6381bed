"""Which tokens must not be evicted and which are evicted first, as ranges of token indices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

_Array = TypeVar("_Array")
"""A tensor or a numpy array."""


@dataclass(frozen=True)
class Protection:
    """What must not be evicted, and what is evicted first.

    Attributes:
        sinks: first tokens, which are protected.
        pins: ranges of token indices that are protected.
        recent: newest tokens, which are protected.
        transient: ranges of token indices that are evicted before all others, unless they are protected.
    """

    sinks: int
    pins: tuple[range, ...]
    recent: int
    transient: tuple[range, ...] = ()

    def pinned(self, index: _Array) -> _Array:
        """Which token indices are in the pins, bool of the same shape."""
        return _in_any(self.pins, index)

    def is_transient(self, index: _Array) -> _Array:
        """Which token indices are in the transient ranges, bool of the same shape."""
        return _in_any(self.transient, index)


def _in_any(ranges: Sequence[range], index: _Array) -> _Array:
    """Which token indices are in one of the ranges, bool of the same shape."""
    inside = index != index  # nowhere, for tensors and arrays alike
    for tokens in ranges:
        inside |= (index >= tokens.start) & (index < tokens.stop)  # type: ignore[operator]
    return inside  # type: ignore[return-value]


def merged(pins: Sequence[range]) -> tuple[range, ...]:
    """The same indices as ranges in order, none of them empty or overlapping."""
    result: list[range] = []
    for pin in sorted((pin for pin in pins if len(pin)), key=lambda pin: pin.start):
        if result and pin.start <= result[-1].stop:
            result[-1] = range(result[-1].start, max(result[-1].stop, pin.stop))
        else:
            result.append(range(pin.start, pin.stop))
    return tuple(result)


def without(pins: Iterable[range], start: int, stop: int | None) -> tuple[range, ...]:
    """Pins without the indices from `start` up to `stop`, None for all from `start` on."""
    rest = []
    for pin in pins:
        after = pin.stop if stop is None else max(min(stop, pin.stop), pin.start)
        rest += [range(pin.start, min(start, pin.stop)), range(max(after, pin.start), pin.stop)]
    return merged(rest)
