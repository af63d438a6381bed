"""The slots of a cache as structures of the native library: addresses of its tensors and the numbers of its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from h2o_stream.cache.groups import GroupedLayer
from h2o_stream.cache.policies.accumulated import Accumulated
from h2o_stream.cache.policies.long_term import DECAY, FAR, LongTerm
from h2o_stream.cache.policies.random import Random
from h2o_stream.cache.policies.recency import Recency
from h2o_stream.cache.policies.tova import Tova
from h2o_stream.cache.slots import SlotLayer
from h2o_stream.native.abi import SLOTS, AttentionLayer, PolicyKind, PositionMode, pointer

POLICIES: dict[type, PolicyKind] = {
    Accumulated: PolicyKind.ACCUMULATED,
    LongTerm: PolicyKind.ACCUMULATED,
    Tova: PolicyKind.TOVA,
    Random: PolicyKind.RANDOM,
    Recency: PolicyKind.RECENCY,
}
"""What the library evicts by; other policies are served eagerly."""

_POSITIONS = {"gap": PositionMode.GAP, "rolling": PositionMode.ROLLING, "absolute": PositionMode.ABSOLUTE}

_BOOKS = ("scores", "index", "rank", "free", "seen")
_STORED = ("keys", "values", "key_codes", "value_codes", "key_range", "value_grid")


class Group(NamedTuple):
    """KV heads of a layer that share a window: their slots and their numbers, [n] int32."""

    slots: SlotLayer
    heads: Tensor


def groups_of(layer: SlotLayer | GroupedLayer, kv_heads: int) -> list[Group]:
    """The groups of heads of a decoder layer."""
    if isinstance(layer, GroupedLayer):
        return [Group(slots, heads.int()) for slots, heads in zip(layer.parts, layer.heads, strict=True)]
    return [Group(layer, torch.arange(kv_heads, dtype=torch.int32))]


def unserved_rules(slots: SlotLayer) -> str:
    """Why the library cannot evict as these slots do, or nothing."""
    if type(slots.policy) not in POLICIES:
        return f"policy {type(slots.policy).__name__} is written in Python"
    return "somebody looks at the probabilities of attention" if slots.watched else ""


def unserved(slots: SlotLayer) -> str:
    """Why the library cannot serve these slots, which are allocated, or nothing."""
    if slots.device.type != "cpu":
        return f"the cache is on {slots.device}"
    if slots.dtype not in (torch.float32, torch.bfloat16):
        return f"keys and values are in {slots.dtype}"
    return unserved_rules(slots)


class BoundLayer:
    """A decoder layer's slots, by address. Good until its tensors or its plan change.

    Args:
        groups: its groups of heads, initialized.
        attention: filled with what the cache knows; sizes, scaling and softcap are the model's.
        max_distance: distances there are to be rotations for; by default what decode steps need.
    """

    def __init__(self, groups: Sequence[Group], attention: AttentionLayer, max_distance: int = 0) -> None:
        self.groups = [group.slots for group in groups]
        first = self.groups[0]
        plan, budget = first.plan, first.budget
        self._alive: list[Any] = [group.heads for group in groups]
        pins = torch.tensor([(pin.start, pin.stop) for pin in budget.pins], dtype=torch.int64).view(-1, 2)
        rope = self._rope(max_distance)
        self._alive += [pins, rope]
        self.attention = attention
        attention.policy = POLICIES[type(first.policy)]
        attention.position_mode = _POSITIONS[plan.positions]
        attention.decay = plan.decay
        attention.long_term = plan.long_term if first.policy.long_term else 0.0
        attention.long_term_decay = DECAY
        attention.long_term_distance = FAR
        attention.sinks = int(budget.sinks)
        attention.pins = pointer(pins)
        attention.pin_count = len(pins)
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
        self.slots = numpy.zeros((len(first.lengths), len(groups)), dtype=SLOTS)
        for number, group in enumerate(groups):
            self._fill(self.slots[:, number], group)

    def _rope(self, max_distance: int) -> Tensor | None:
        table = self.groups[0].table
        if table is None:
            return None
        most = max(max_distance, *(slots.reach(slots.store.slots) for slots in self.groups))
        return table.upto(most, torch.device("cpu"), torch.float32).contiguous()

    @staticmethod
    def _fill(rows: Any, group: Group) -> None:
        """Structures [B] of one group."""
        slots = group.slots
        tensors = {name: getattr(slots.store, name, None) for name in _STORED}
        tensors |= {name: getattr(slots, name) for name in _BOOKS}
        tensors["long_term"] = slots.lasting if slots.policy.long_term else None
        for name, tensor in tensors.items():
            if tensor is not None:
                stride = tensor.stride(0) * tensor.element_size()
                rows[name] = pointer(tensor) + stride * numpy.arange(len(rows))
        rows["heads"], rows["head_count"] = pointer(group.heads), len(group.heads)
        rows["slot_count"], rows["recent"], rows["span"] = slots.store.slots, int(slots.budget.recent), int(slots.span)
