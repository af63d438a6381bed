"""The slots of a cache as structures of the native library: addresses of arrays and the numbers of the plan.

The arrays of a head group may be tensors of torch or arrays of numpy; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream import config
from h2o_stream.cache.group_rules import HeadShape
from h2o_stream.cache.rotations import FINE_ROWS
from h2o_stream.cache.slots import Slots
from h2o_stream.native.abi import SLOTS, AttentionLayer, PolicyKind, PositionMode
from h2o_stream.native.pointers import Array, dtype_name, pointer, row_bytes

POLICIES: dict[str, PolicyKind] = {
    config.POLICIES[name].rule: kind
    for name, kind in {
        "h2o": PolicyKind.ACCUMULATED,
        "h2o-paper": PolicyKind.ACCUMULATED,
        "tova": PolicyKind.TOVA,
        "random": PolicyKind.RANDOM,
        "recent": PolicyKind.RECENCY,
    }.items()
}
"""Rules of policies that the library implements; others run eagerly."""

_POSITIONS = {"gap": PositionMode.GAP, "rolling": PositionMode.ROLLING, "absolute": PositionMode.ABSOLUTE}

_FIELDS = {"long_term_scores": "long_term"}
"""What arrays are called in `abi.h`, where that differs."""


def why_not(group: Slots) -> str:
    """Why the library cannot attend and evict as this group does, where it is if it is allocated; or nothing."""
    if group.rule not in POLICIES:
        return f"policy {group.rule.rpartition(':')[2]} is written in Python"
    if group.watch:
        return "somebody looks at the probabilities of attention"
    if group.is_initialized and str(group.device) != "cpu":
        return f"the cache is on {group.device}"
    if group.is_initialized and dtype_name(group.dtype) not in ("float32", "bfloat16"):
        return f"keys and values are in {group.dtype}"
    return ""


class BoundLayer:
    """The slots of a decoder layer or of one head group, by address. Valid for one revision of the cache.

    Args:
        head_groups: head groups with their slots allocated.
        attention: filled with what the cache knows; the caller sets sizes, scaling and softcap.
        new_tokens: how many are attended to at once, beside those in slots; 0 for decode steps only.
    """

    def __init__(
        self,
        head_groups: Sequence[Slots],
        attention: AttentionLayer,
        new_tokens: int = 0,
    ) -> None:
        self.head_groups, first = head_groups, head_groups[0]
        plan, protection = first.plan, first.protection
        whole = range(attention.kv_heads)
        all_heads = [whole if group.heads is None or len(head_groups) == 1 else group.heads for group in head_groups]
        self._heads = [numpy.asarray(heads, numpy.int32) for heads in all_heads]
        pins, transient = _bounds(protection.pins), _bounds(protection.transient)
        rope, codes = self._rope(new_tokens)
        self._alive = pins, transient, rope, codes
        self.attention = attention
        attention.policy = POLICIES[first.rule]
        attention.position_mode = _POSITIONS["absolute" if first.table is None else plan.positions]
        attention.decay = plan.decay
        attention.long_term = plan.long_term if first.has_long_term else 0.0
        attention.long_term_decay = config.LONG_TERM_DECAY
        attention.long_term_distance = config.LONG_TERM_DISTANCE
        attention.sinks = int(protection.sinks)
        attention.sliding_window = first.sliding or 0
        attention.chunked = first.chunked
        attention.seed = plan.seed
        attention.layer_index = int(first.layer)
        attention.rope_rows, attention.rotary_dims = (0, 0) if rope is None else rope.shape
        attention.rope = pointer(rope, "float32", attention.rope_rows * attention.rotary_dims)
        rows = FINE_ROWS + -(-attention.rope_rows // FINE_ROWS)
        attention.rope_codes = pointer(codes, "int16", rows * attention.rotary_dims)
        attention.in_bfloat16 = dtype_name(first.dtype) == "bfloat16"
        attention.kv_bits = plan.kv_bits
        attention.exact_sinks = plan.exact_sinks
        attention.residual = plan.residual
        self.slots = numpy.zeros((len(first.tensors()["seen"]), len(head_groups)), dtype=SLOTS)
        for name, count, ranges in (("pins", "pin_count", pins), ("transient", "transient_count", transient)):
            self.slots[name], self.slots[count] = pointer(ranges, "int64", 2 * len(ranges)), len(ranges)
        for number, (group, heads) in enumerate(zip(head_groups, self._heads, strict=True)):
            self._fill(self.slots[:, number], attention, group, heads)

    def set_sinks(self, sinks: Array | None) -> None:
        """Set the learned sinks [query_heads] float32, or that there are none."""
        self._sinks = sinks  # kept alive
        self.attention.sink_logits = pointer(sinks, "float32", self.attention.query_heads)

    def _rope(self, new_tokens: int) -> tuple[Array | None, Array | None]:
        """The table of rotations: no longer than the stream, however long a context the model was trained for.

        The second one is for attention in fixed point, to keys of 8 bits.
        """
        first = self.head_groups[0]
        table = first.table
        if table is None:
            return None, None
        limit = max(group.max_distance(group.num_slots + new_tokens) for group in self.head_groups)
        codes = table.codes(limit) if first.plan.kv_bits == 8 else None
        return table.on_cpu(limit), codes

    @staticmethod
    def _fill(rows: Any, attention: AttentionLayer, group: Slots, heads: NDArray[Any]) -> None:
        """Fill the structures [B] of one group of `heads`."""
        arrays = group.tensors()
        shape = HeadShape(attention.query_heads, attention.kv_heads, attention.head_size, attention.value_size)
        row_numbers = numpy.arange(len(rows))
        for name, x in group.layout(shape, group.dtype, len(rows), group.num_slots).items():
            first = pointer(arrays[name], x.dtype, prod(x.shape))
            rows[_FIELDS.get(name, name)] = first + row_bytes(arrays[name]) * row_numbers
        rows["heads"], rows["head_count"] = pointer(heads, "int32", len(heads)), len(heads)
        rows["slot_count"], rows["recent"], rows["span"] = (
            group.num_slots,
            int(group.protection.recent),
            int(group.span),
        )


def _bounds(ranges: Sequence[range]) -> NDArray[numpy.int64]:
    """[n, 2] int64, where each range starts and stops."""
    return numpy.array([(tokens.start, tokens.stop) for tokens in ranges], numpy.int64).reshape(-1, 2)
