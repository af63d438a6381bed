"""The slots of a cache as structures of the native library: addresses of tensors and the numbers of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.policies.accumulated import Accumulated
from h2o_stream.cache.policies.long_term import LongTerm
from h2o_stream.cache.policies.random import Random
from h2o_stream.cache.policies.recency import Recency
from h2o_stream.cache.policies.tova import Tova
from h2o_stream.cache.slots import rank_dtype
from h2o_stream.native.abi import SLOTS, AttentionLayer, PolicyKind, PositionMode, pointer

POLICIES: dict[type, PolicyKind] = {
    Accumulated: PolicyKind.ACCUMULATED,
    LongTerm: PolicyKind.ACCUMULATED,
    Tova: PolicyKind.TOVA,
    Random: PolicyKind.RANDOM,
    Recency: PolicyKind.RECENCY,
}
"""Policies that the library implements; others run eagerly."""

_POSITIONS = {"gap": PositionMode.GAP, "rolling": PositionMode.ROLLING, "absolute": PositionMode.ABSOLUTE}


def why_not(group: HeadGroup) -> str:
    """Why the library cannot attend and evict as this group does, where it is if it is allocated; or nothing."""
    if type(group.policy) not in POLICIES:
        return f"policy {type(group.policy).__name__} is written in Python"
    if group.watch:
        return "somebody looks at the probabilities of attention"
    if group.is_initialized and group.device.type != "cpu":
        return f"the cache is on {group.device}"
    if group.is_initialized and group.dtype not in (torch.float32, torch.bfloat16):
        return f"keys and values are in {group.dtype}"
    return ""


class BoundLayer:
    """The slots of a decoder layer or of one head group, by address. Valid for one revision of the cache.

    Args:
        head_groups: with their slots allocated.
        attention: filled with what the cache knows; the caller sets sizes, scaling and softcap.
        max_distance: distances that need rotations; by default those of decode steps.
    """

    def __init__(self, head_groups: Sequence[HeadGroup], attention: AttentionLayer, max_distance: int = 0) -> None:
        self.head_groups, first = head_groups, head_groups[0]
        plan, protection = first.plan, first.protection
        whole = torch.arange(attention.kv_heads, device="cpu")
        all_heads = [whole if group.heads is None or len(head_groups) == 1 else group.heads for group in head_groups]
        self._heads = [heads.int() for heads in all_heads]
        pins, transient = _bounds(protection.pins), _bounds(protection.transient)
        rope = self._rope(max_distance)
        self._alive = pins, transient, rope
        self.attention = attention
        attention.policy = POLICIES[type(first.policy)]
        attention.position_mode = _POSITIONS["absolute" if first.table is None else plan.positions]
        attention.decay = plan.decay
        attention.long_term = plan.long_term if first.policy.long_term else 0.0
        attention.long_term_decay = LongTerm.far_decay
        attention.long_term_distance = LongTerm.far
        attention.sinks = int(protection.sinks)
        attention.pins = pointer(pins, torch.int64, 2 * len(pins))
        attention.pin_count = len(pins)
        attention.transient = pointer(transient, torch.int64, 2 * len(transient))
        attention.transient_count = len(transient)
        attention.sliding_window = first.sliding or 0
        attention.seed = plan.seed
        attention.layer_index = int(first.policy.layer)
        attention.rope_rows, attention.rotary_dims = (0, 0) if rope is None else rope.shape
        attention.rope = pointer(rope, torch.float32, attention.rope_rows * attention.rotary_dims)
        attention.in_bfloat16 = first.dtype == torch.bfloat16
        attention.kv_bits = plan.kv_bits
        attention.exact_sinks = first.store.sinks
        attention.residual = first.store.residual
        self.slots = numpy.zeros((len(first.seen), len(head_groups)), dtype=SLOTS)
        for number, (group, heads) in enumerate(zip(head_groups, self._heads, strict=True)):
            self._fill(self.slots[:, number], attention, group, heads)

    def _rope(self, max_distance: int) -> Tensor | None:
        table = self.head_groups[0].table
        if table is None:
            return None
        limit = max(max_distance, *(group.max_distance(group.store.slots) for group in self.head_groups))
        return table.upto(limit, torch.device("cpu"), torch.float32).contiguous()

    @staticmethod
    def _fill(rows: Any, attention: AttentionLayer, group: HeadGroup, heads: Tensor) -> None:
        """Fill the structures [B] of one group of `heads`."""
        for name, (tensor, dtype, size) in _bound_tensors(attention, group).items():
            count = len(heads) * size if name != "seen" else 1  # of each row
            first = pointer(tensor, dtype, len(rows) * count)
            if tensor is not None:
                rows[name] = first + tensor.stride(0) * tensor.element_size() * numpy.arange(len(rows))
        rows["heads"], rows["head_count"] = pointer(heads, torch.int32, len(heads)), len(heads)
        rows["slot_count"], rows["recent"], rows["span"] = (
            group.store.slots,
            int(group.protection.recent),
            int(group.span),
        )


def _bound_tensors(attention: AttentionLayer, group: HeadGroup) -> dict[str, tuple[Tensor | None, torch.dtype, int]]:
    """The tensors of a group by the name of their field, with their dtype and numbers per head, as `abi.h` says."""
    store, slots = group.store, group.store.slots
    key, value, bits = attention.head_size, attention.value_size, group.plan.kv_bits
    exact, encoded = (slots, 0) if bits == 16 else (store.exact, slots - store.exact)

    def stored(name: str) -> Tensor | None:
        return getattr(store, name, None)

    return {
        "keys": (stored("keys"), group.dtype, exact * key),
        "values": (stored("values"), group.dtype, exact * value),
        "key_codes": (stored("key_codes"), torch.uint8, encoded * key * bits // 8),
        "value_codes": (stored("value_codes"), torch.uint8, encoded * value * bits // 8),
        "key_range": (stored("key_range"), torch.float32, 2 * key),
        "value_grid": (stored("value_grid"), torch.float16, 2 * encoded),
        "scores": (group.scores, torch.float32, slots),
        "long_term": (group.long_term_scores if group.policy.long_term else None, torch.float32, slots),
        "index": (group.index, torch.int32, slots),
        "rank": (group.rank, rank_dtype(slots), slots),
        "free": (group.free, torch.int64, 1),
        "seen": (group.seen, torch.int64, 1),
    }


def _bounds(ranges: Sequence[range]) -> Tensor:
    """[n, 2] int64, where each range starts and stops."""
    return torch.tensor([(tokens.start, tokens.stop) for tokens in ranges], dtype=torch.int64, device="cpu").view(-1, 2)
