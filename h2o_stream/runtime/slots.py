"""Slots of numpy arrays, which native code fills: the counterpart of `cache.head_group.HeadGroup` for one stream.

Numbers in bfloat16 are uint16 arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream.cache.group_rules import GroupRules, HeadShape, Table
from h2o_stream.cache.ranks import rank_dtype
from h2o_stream.cache.shared_state import Revision, TokenCount
from h2o_stream.cache.state import require_array
from h2o_stream.config import POLICIES, CachePlan
from h2o_stream.memory import anonymous_memory

NUMBERS = {"float32": numpy.dtype(numpy.float32), "bfloat16": numpy.dtype(numpy.uint16)}
"""What keys and values are stored as."""


_Empty = tuple[tuple[int, ...], float, Any]
"""Shape, value and dtype of an array with nothing in it."""

_ALIGNMENT = 64
"""Bytes of a cache line, at which arrays begin."""


class ArrayGroup(GroupRules):
    """The slots of KV heads that share a window size; nothing is allocated before the first token.

    Args:
        plan: how many tokens are held, and how.
        shape: of the layer's heads.
        dtype: of keys and values, ``float32`` or ``bfloat16``.
        layer: index of the decoder layer.
        heads: the KV heads of the layer in this group; None for all.
        sliding: keys of this age and older are hidden.
        table: rotations for keys that come un-rotated; None with ``absolute``.
        tokens: counts the tokens of the cache.
        revision: grows when arrays are allocated or rules change.

    Its arrays [1, heads, *] are those of `cache.slots.Slots` and of `QuantizedStore`.
    """

    def __init__(
        self,
        plan: CachePlan,
        shape: HeadShape,
        dtype: str,
        layer: int,
        heads: tuple[int, ...] | None = None,
        sliding: int | None = None,
        table: Table | None = None,
        tokens: TokenCount | None = None,
        revision: Revision | None = None,
    ) -> None:
        super().__init__(plan, tokens, revision)
        self.shape, self.layer, self.heads, self.sliding, self.table = shape, layer, heads, sliding, table
        self.dtype, self.queries_per_key = dtype, shape.query_heads // shape.kv_heads
        self._arrays: dict[str, NDArray[Any]] = {}
        self.follow(plan)

    def follow(self, plan: CachePlan) -> None:
        """See `GroupRules`."""
        super().follow(plan)
        self.rule = plan.rule
        self.has_long_term = plan.long_term > 0 and plan.rule == POLICIES["h2o"].rule

    def tensors(self) -> dict[str, NDArray[Any]]:
        """See `GroupRules`."""
        return self._arrays

    def arrays(self) -> dict[str, NDArray[Any]]:
        """See `GroupRules`."""
        return {name: array.copy() for name, array in self.first_slots(self.used_slots).items()}

    @property
    def num_slots(self) -> int:
        """See `GroupRules`."""
        return int(self._arrays["index"].shape[-1])

    @property
    def token_indices(self) -> NDArray[numpy.int32]:
        """See `GroupRules`."""
        return self._arrays["index"]

    def allocate_on_cpu(self, shape: HeadShape, dtype: str, rows: int, slots: int) -> None:
        """See `GroupRules`; only `slots` is not known before."""
        self.allocate(slots)

    def allocate(self, slots: int) -> None:
        """Allocate every slot, empty."""
        self._arrays = _in_one_block({name: self._empty(name, slots) for name in self._names()})
        if "key_range" in self._arrays:
            self._arrays["key_range"][:, :, 1] = -numpy.inf
        self.is_initialized, self.filled = True, 0
        self.revision.bump()

    def reset(self) -> None:
        """See `GroupRules`."""
        self._arrays, self.is_initialized = {}, False
        self.revision.bump()

    def resize(self, slots: int, filled: int) -> None:
        """See `GroupRules`."""
        exact, arrays = self.exact, self._arrays
        index = arrays["index"][..., exact:]
        is_token = index >= 0
        order = numpy.where(is_token, index, numpy.iinfo(index.dtype).max).argsort(-1)[..., : slots - exact]
        arrays["free"][:] = is_token.sum(-1, keepdims=True) + exact
        self._arrays = resized = _in_one_block({name: self._empty(name, slots) for name in self._names()})
        for name, old in arrays.items():
            new = resized[name]
            if name not in self._movable():
                new[:] = old
                continue
            kept = 0 if name.endswith(("codes", "grid")) else exact
            new[:, :, :kept] = old[:, :, :kept]
            places = order.reshape(*order.shape, *(1,) * (old.ndim - order.ndim))
            new[:, :, kept : kept + order.shape[-1]] = numpy.take_along_axis(old[:, :, kept:], places, 2)
        resized["rank"][resized["index"] < 0] = slots
        self.filled = filled
        self.revision.bump()

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """See `GroupRules`."""
        self.allocate(self.slots_of(arrays))
        for name, array in self.first_slots(arrays["index"].shape[-1]).items():
            array[:] = require_array(arrays, name, like=array)

    def _names(self) -> tuple[str, ...]:
        return ("keys", "values", *self._quantized(), "scores", "index", "rank", *self._long_term(), "free", "seen")

    def _movable(self) -> tuple[str, ...]:
        """The arrays with a row for each slot that eviction may free."""
        if not self._quantized():
            return ("keys", "values", "scores", "index", "rank", *self._long_term())
        return ("key_codes", "value_codes", "value_grid", "scores", "index", "rank", *self._long_term())

    def _quantized(self) -> tuple[str, ...]:
        return ("key_codes", "value_codes", "key_range", "value_grid") if self.plan.kv_bits < 16 else ()

    def _long_term(self) -> tuple[str, ...]:
        return ("long_term_scores",) if self.has_long_term else ()

    def _empty(self, name: str, slots: int) -> _Empty:
        """An array with so many slots."""
        heads, bits, encoded = self.shape, self.plan.kv_bits, slots - self.exact
        exact = slots if bits == 16 else self.exact
        number, whole = NUMBERS[self.dtype], numpy.dtype(numpy.int64)
        shape, value, dtype = {
            "keys": ((exact, heads.key_size), 0, number),
            "values": ((exact, heads.value_size), 0, number),
            "key_codes": ((encoded, heads.key_size * bits // 8), 0, numpy.dtype(numpy.uint8)),
            "value_codes": ((encoded, heads.value_size * bits // 8), 0, numpy.dtype(numpy.uint8)),
            "key_range": ((2, heads.key_size), numpy.inf, numpy.dtype(numpy.float32)),
            "value_grid": ((encoded, 2), 0, numpy.dtype(numpy.float16)),
            "scores": ((slots,), -numpy.inf, numpy.dtype(numpy.float32)),
            "long_term_scores": ((slots,), 0, numpy.dtype(numpy.float32)),
            "index": ((slots,), -1, numpy.dtype(numpy.int32)),
            "rank": ((slots,), slots, numpy.dtype(rank_dtype(slots))),
            "free": ((1,), self.exact, whole),
            "seen": ((1, 1), 0, whole),
        }[name]
        count = heads.kv_heads if self.heads is None else len(self.heads)
        return (1, *shape) if name == "seen" else (1, count, *shape), value, dtype


def _in_one_block(empty: Mapping[str, _Empty]) -> dict[str, NDArray[Any]]:
    """Empty arrays in memory of their own, which goes back to the system with them.

    Slots are resized while others come and go. What is freed in the heap stays there as holes between them: a fifth of
    what 64 conversations took.
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape, _, dtype in empty.values()]
    starts = [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
    block = anonymous_memory(starts[-1])
    arrays = dict[str, NDArray[Any]]()
    for (name, (shape, value, dtype)), start in zip(empty.items(), starts, strict=False):
        arrays[name] = numpy.ndarray(shape, dtype, block, start)
        if value:
            arrays[name].fill(value)
    return arrays
