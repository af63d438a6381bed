"""The slots of a cache as structures of the native library: addresses of tensors and the numbers of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.policies.accumulated import Accumulated
from h2o_stream.cache.policies.long_term import DECAY, FAR, LongTerm
from h2o_stream.cache.policies.random import Random
from h2o_stream.cache.policies.recency import Recency
from h2o_stream.cache.policies.tova import Tova
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

_BOOKKEEPING = ("scores", "index", "rank", "free", "seen")
_STORED = ("keys", "values", "key_codes", "value_codes", "key_range", "value_grid")


def unsupported_rules(group: HeadGroup) -> str:
    """Why the library cannot evict as this group does, or nothing."""
    if type(group.policy) not in POLICIES:
        return f"policy {type(group.policy).__name__} is written in Python"
    return "somebody looks at the probabilities of attention" if group.watched else ""


def unsupported(group: HeadGroup) -> str:
    """Why the library does not support this group, which is allocated, or nothing."""
    if group.device.type != "cpu":
        return f"the cache is on {group.device}"
    if group.dtype not in (torch.float32, torch.bfloat16):
        return f"keys and values are in {group.dtype}"
    return unsupported_rules(group)


class BoundLayer:
    """The slots of a decoder layer or of one head group, by address. Valid for one revision of the cache.

    Args:
        head_groups: with their slots allocated.
        attention: filled with what the cache knows; the caller sets sizes, scaling and softcap.
        max_distance: distances that need rotations; by default those of decode steps.
    """

    def __init__(self, head_groups: Sequence[HeadGroup], attention: AttentionLayer, max_distance: int = 0) -> None:
        self.head_groups, first = head_groups, head_groups[0]
        plan, budget = first.plan, first.budget
        whole = torch.arange(attention.kv_heads)
        all_heads = [whole if group.heads is None or len(head_groups) == 1 else group.heads for group in head_groups]
        self._heads = [heads.int() for heads in all_heads]
        pins, transient = _bounds(budget.pins), _bounds(budget.transient)
        rope = self._rope(max_distance)
        self._alive = pins, transient, rope
        self.attention = attention
        attention.policy = POLICIES[type(first.policy)]
        attention.position_mode = _POSITIONS["absolute" if first.table is None else plan.positions]
        attention.decay = plan.decay
        attention.long_term = plan.long_term if first.policy.long_term else 0.0
        attention.long_term_decay = DECAY
        attention.long_term_distance = FAR
        attention.sinks = int(budget.sinks)
        attention.pins = pointer(pins)
        attention.pin_count = len(pins)
        attention.transient = pointer(transient)
        attention.transient_count = len(transient)
        attention.sliding_window = first.sliding or 0
        attention.seed = plan.seed
        attention.layer_index = int(first.policy.layer)
        attention.rope = pointer(rope)
        attention.rope_rows = 0 if rope is None else rope.shape[0]
        attention.rotary_dims = 0 if rope is None else rope.shape[1]
        attention.in_bfloat16 = first.dtype == torch.bfloat16
        attention.kv_bits = plan.kv_bits
        attention.exact_sinks = first.store.sinks
        attention.residual = first.store.residual
        self.slots = numpy.zeros((len(first.seen), len(head_groups)), dtype=SLOTS)
        for number, (group, heads) in enumerate(zip(head_groups, self._heads, strict=True)):
            self._fill(self.slots[:, number], group, heads)

    def _rope(self, max_distance: int) -> Tensor | None:
        table = self.head_groups[0].table
        if table is None:
            return None
        limit = max(max_distance, *(group.max_distance(group.store.slots) for group in self.head_groups))
        return table.upto(limit, torch.device("cpu"), torch.float32).contiguous()

    @staticmethod
    def _fill(rows: Any, group: HeadGroup, heads: Tensor) -> None:
        """Fill the structures [B] of one group of `heads`."""
        tensors = {name: getattr(group.store, name, None) for name in _STORED}
        tensors |= {name: getattr(group, name) for name in _BOOKKEEPING}
        tensors["long_term"] = group.long_term_scores if group.policy.long_term else None
        for name, tensor in tensors.items():
            if tensor is not None:
                stride = tensor.stride(0) * tensor.element_size()
                rows[name] = pointer(tensor) + stride * numpy.arange(len(rows))
        rows["heads"], rows["head_count"] = pointer(heads), len(heads)
        rows["slot_count"], rows["recent"], rows["span"] = group.store.slots, int(group.budget.recent), int(group.span)


def _bounds(ranges: Sequence[range]) -> Tensor:
    """[n, 2] int64, where each range starts and stops."""
    return torch.tensor([(tokens.start, tokens.stop) for tokens in ranges], dtype=torch.int64).view(-1, 2)
