"""How many heads hold each token of a stream: all heads, or those that copy what was said long ago."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy
from numpy.typing import NDArray

from h2o_stream.cache.slots import Slots
from h2o_stream.cache.window_rules import WindowRules

if TYPE_CHECKING:
    from h2o_stream.cache.full_cache import FullCache

IntegerArray = NDArray[numpy.integer[Any]]

_LARGER = 1.25
"""Window relative to the mean from which on the heads of a group count as retrieval heads.

The groups of the embedded model have shares of 0.6 to 1.2 (75 heads) and of 1.4 to 3.5 (15 heads).
"""


@dataclass(frozen=True)
class Holders:
    """How many of some heads hold each token, in the first row of a batch.

    The cost of making and of asking it depends on what is held, not on the length of the stream.

    Attributes:
        tokens: [n] integer, the indices of the tokens that any of the heads holds, in order.
        counts: [n] integer, how many of the heads hold each of them.
    """

    tokens: IntegerArray
    counts: IntegerArray
    num_heads: int

    @classmethod
    def of(cls, kept: Sequence[IntegerArray]) -> Holders:
        """From the token indices [heads, n] that heads hold, -1 where they hold fewer."""
        indices = numpy.concatenate([index.ravel() for index in kept] or [numpy.empty(0, numpy.int32)])
        tokens, counts = numpy.unique(indices[indices >= 0], return_counts=True)
        return cls(tokens, counts, sum(map(len, kept)))

    @cached_property
    def _held_before(self) -> IntegerArray:
        """[n + 1] integer, the sum of the counts before each token, and of all."""
        return numpy.concatenate(([0], self.counts.cumsum()))

    def _places(self, start: int, stop: int) -> tuple[int, int]:
        """Where the tokens from index `start` up to `stop` begin and end in `tokens`."""
        first, last = numpy.searchsorted(self.tokens, (start, max(start, stop))).tolist()
        return first, last

    def share(self, start: int, stop: int) -> float:
        """How much of the tokens from index `start` up to `stop` a head holds in the mean: 0 to 1; 0 of no tokens."""
        if stop <= start or not self.num_heads:
            return 0.0
        first, last = self._places(start, stop)
        return float(self._held_before[last] - self._held_before[first]) / (self.num_heads * (stop - start))

    def shares(self, start: int, stop: int) -> Iterator[tuple[int, float]]:
        """The tokens from index `start` up to `stop` that any head holds, in order, and which share of the heads."""
        places = slice(*self._places(start, stop))
        for token, count in zip(self.tokens[places].tolist(), self.counts[places].tolist(), strict=True):
            yield token, count / self.num_heads


def holders(cache: WindowRules | FullCache, layer: int | None = None) -> Holders:
    """Which heads hold what, of one layer or of all, those with sliding windows of their own included."""
    if isinstance(cache, WindowRules):
        return _of_groups(cache.head_groups if layer is None else cache.groups_of(layer))
    return _of_full(cache, range(len(cache.layers)) if layer is None else [layer])


def retrieval_holders(cache: WindowRules | FullCache) -> Holders:
    """Which of the heads that find and copy old passages hold what: those that were given larger windows.

    If there are none, because windows are equal, it is all heads of the layers that follow the plan.
    """
    if not isinstance(cache, WindowRules):
        whole = [number for number, layer in enumerate(cache.layers) if not getattr(layer, "is_sliding", False)]
        return _of_full(cache, whole or range(len(cache.layers)))
    larger = [
        group
        for number in cache.evicting_layers
        for group, window in zip(cache.groups_of(number), filter(None, cache.specs[number].local_windows), strict=True)
        if window.share >= _LARGER
    ]
    return _of_groups(larger or cache.evicting_groups)


def _of_groups(groups: Sequence[Slots]) -> Holders:
    return Holders.of([group.token_indices[0] for group in groups if group.is_initialized])


def _of_full(cache: FullCache, layers: Sequence[int]) -> Holders:
    """The holders in layers in which every head holds the newest tokens, mostly all."""
    seen, shapes = cache.seen_tokens, [cache.kept(number).shape for number in layers]
    begins = numpy.zeros(seen + 1, dtype=numpy.int64)  # how many more heads hold a token than its predecessor
    for _, heads, length in shapes:
        begins[seen - length] += heads
    counts = begins[:seen].cumsum()
    tokens = counts.nonzero()[0]
    return Holders(tokens, counts[tokens], sum(heads for _, heads, _ in shapes))
