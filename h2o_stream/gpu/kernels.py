"""The `Kernels` of head groups on a GPU: fills in what the Triton kernels need to know of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor

from h2o_stream.cache.attend import attend
from h2o_stream.cache.attention import LogitTransform, QueryChunk
from h2o_stream.cache.eager import EagerKernels
from h2o_stream.cache.group_rules import HeadShape
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.slots import ENCODED
from h2o_stream.cache.windows import Schedule
from h2o_stream.config import LONG_TERM_DECAY, LONG_TERM_DISTANCE
from h2o_stream.gpu import available
from h2o_stream.gpu.decode import decode_kernel
from h2o_stream.gpu.groups import (
    MAX_CHUNK,
    bounds_of,
    decoded,
    encode,
    limits_of,
    num_evictions,
    slots_of,
    walks,
    why_not,
)
from h2o_stream.gpu.prompt import prompt_kernel
from h2o_stream.native.abi import PositionMode
from h2o_stream.native.slots import POLICIES

_EAGER = EagerKernels()

_POSITIONS = {"gap": PositionMode.GAP, "rolling": PositionMode.ROLLING, "absolute": PositionMode.ABSOLUTE}

_TILE, _LARGE_SHARED, _LARGEST_SHARED, _USUAL_HEAD = 1 << 16, 160 << 10, 220 << 10, 256
"""Bytes of keys that a prompt multiplies at once, and of shared memory from which on they fit, and twice those of heads
with so many."""

_SMALL_WINDOW, _SHARING_WINDOW = 512, 1024
"""Slots up to which a program of a step takes 64 of them, and from which on those of a prompt rotate for each other."""


_PARTS, _FLOAT32 = 1 << 14, 1 << 13
"""Numbers that the last program of a step merges at once, more do not fit into registers; and of keys in float32 that
each program multiplies, more do not fit into desktops' shared memory."""


class Norms(NamedTuple):
    """What becomes of the new token's queries and keys before they are rotated.

    Attributes:
        query: [D] float32 weights of an RMS norm of each head, or None.
        factor: on what is rotated.
    """

    query: Tensor | None = None
    key: Tensor | None = None
    query_epsilon: float = 0.0
    key_epsilon: float = 0.0
    factor: float = 1.0


_PLAIN = Norms()


class NewTokens(NamedTuple):
    """Q new tokens of a layer and where their outputs go: [B, H, Q, D], each number beside the next.

    Attributes:
        heads: [n] int64, the KV heads of the head group; None for all of these.
        out: [B, Hq, Q, Dv].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    heads: Tensor | None = None

    def one(self, number: int, heads: Tensor | None) -> NewTokens:
        """One of the tokens, for a head group."""
        query, key, value, out = (x[:, :, number : number + 1] for x in self[:4])
        return NewTokens(query, key, value, out, heads)


@dataclass(frozen=True)
class _Rules:
    """What a head group is to the kernels, for one revision of the cache: arguments by name."""

    tensors: dict[str, Any]
    numbers: dict[str, Any]
    constants: dict[str, Any]


class GpuKernels:
    """Supports built-in policies; the rest is eager.

    Args:
        device: where the layers are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._overlaps, on_gpu = device, available.overlaps(device), device.type == "cuda"
        found = torch.cuda.get_device_properties(device) if on_gpu else None
        self._processors = available.processors(device)
        self._shared = getattr(found, "shared_memory_per_block_optin", 99 << 10) if found else 227 << 10
        self._rules: WeakKeyDictionary[HeadGroup, tuple[Any, _Rules]] = WeakKeyDictionary()
        self._spaces: dict[Any, list[Tensor]] = {}

    def supports(self, group: HeadGroup, query: Tensor, transform: LogitTransform) -> bool:
        """Whether the kernels can compute this group."""
        return not why_not(group) and query.dtype == group.dtype and query.device == group.device

    def chunk_size(self, group: HeadGroup, new: int) -> int:
        """A whole prompt, if it can be taken at once."""
        return new if walks(group) else group.plan.chunk or new

    def decode(self, group: HeadGroup, chunk: QueryChunk) -> Tensor:
        """See `Kernels.decode`."""
        if not self.can_step(group, chunk.lengths):
            return _EAGER.decode(group, chunk)
        tokens = _new_tokens(chunk)
        self.step(group, tokens, chunk.transform, chunk.lengths)
        return tokens.out.transpose(1, 2)

    def prefill(self, group: HeadGroup, chunk: QueryChunk) -> Tensor:
        """See `Kernels.prefill`."""
        if not walks(group):
            return _EAGER.prefill(group, chunk)
        tokens = _new_tokens(chunk)
        limits = limits_of(group, [*zip(chunk.lengths, chunk.counts, strict=True)], chunk.new)
        self.prompt(group, tokens, chunk.transform, chunk.count.flatten() if chunk.ragged else None, limits)
        group.seen += chunk.count
        group.filled = group.store.slots
        return tokens.out.transpose(1, 2)

    def rehearse(self, group: HeadGroup, shape: HeadShape, dtype: torch.dtype) -> None:
        """Take a prompt and a token into slots like those of a group, so that kernels that do not fit fail early."""
        heads = shape.kv_heads if group.heads is None else len(group.heads)
        rules: dict[str, Any] = {
            "layer": group.layer,
            "sliding": group.sliding,
            "chunked": group.chunked,
            "table": group.table,
        }
        trial = HeadGroup(group.plan, self._device, **rules)
        trial.schedule = Schedule.equal(group.schedule.window)
        for count in (MAX_CHUNK + 1, 1):
            sizes = [(heads * shape.query_heads // shape.kv_heads, shape.key_size), (heads, shape.key_size)]
            query, key = (torch.zeros(1, n, count, size, dtype=dtype, device=self._device) for n, size in sizes)
            value = key.new_zeros(1, heads, count, shape.value_size)
            trial.tokens.expect((count,), count)
            attend(trial, query, key, value, LogitTransform(1.0), kernels=self)
            trial.tokens.advance()

    @staticmethod
    def can_step(group: HeadGroup, lengths: tuple[int, ...]) -> bool:
        """Whether the next token of every row evicts the same number of tokens, at most one."""
        return len(evictions := num_evictions(group, lengths)) == 1 and max(evictions) <= 1

    @staticmethod
    def is_empty_first(group: HeadGroup, lengths: tuple[int, ...]) -> bool:
        """Whether a token takes an empty slot before any is evicted."""
        return group.schedule.fixed or num_evictions(group, lengths) == {0}

    def step(
        self,
        group: HeadGroup,
        new: NewTokens,
        transform: LogitTransform,
        lengths: tuple[int, ...],
        norms: Norms = _PLAIN,
        streams: Tensor | None = None,
    ) -> None:
        """Take one token of each row, [B, H, 1, D], see `decode_kernel`; it is counted in the group's `seen`. With
        `streams` that of each row that is in this table.
        """
        rules, empty_first = self.rules_of(group, new, transform), self.is_empty_first(group, lengths)
        heads, places = rules.constants["H"], group.store.slots - 1
        size, exact = 64 if places <= _SMALL_WINDOW else 128, group.dtype == torch.float32
        if exact:
            size = min(size, _FLOAT32 // triton.next_power_of_2(_numbers_of_head(rules.constants)))
        warps = 8 if exact or size == 128 else 4
        splits, rows = triton.cdiv(places, size), len(new.out if streams is None else streams)
        groups, members = rules.constants["G"], triton.next_power_of_2(rules.constants["G"])
        space, bits = self._space, group.plan.kv_bits
        decode_kernel[rows * heads, splits](
            new.query, new.key, new.value, new.out, new.heads,
            **slots_of(group), **rules.tensors | ({} if streams is None else {"pins": streams, "transient": streams}),
            streams=streams, sink_logits=transform.sinks, query_norm=norms.query, key_norm=norms.key,
            logits=space("logits", rows * heads * groups * group.store.slots, group.device),
            ranges=None if bits == 16 else space("ranges", rows * heads * 2 * new.key.shape[-1], group.device),
            parts=space("parts", rows * heads * groups * splits * new.value.shape[-1], group.device),
            peaks=space("peaks", rows * heads * groups * splits * 2, group.device),
            arrived=space("arrived", rows * heads + rows, group.device, torch.int32),
            **_strides(new, 0, 1), **rules.numbers, query_eps=norms.query_epsilon, key_eps=norms.key_epsilon,
            factor=norms.factor, **rules.constants, G2=members, GP=max(members, 16), BS=size, NS=splits,
            NP=max(min(triton.next_power_of_2(splits), 32, _PARTS // (members * rules.constants["VP"])), 1),
            P=max(min(triton.next_power_of_2(places), 8192 // members), 32 * warps), EMPTY_FIRST=empty_first,
            PDL=self._overlaps, num_warps=warps, **({"launch_pdl": True} if self._overlaps else {}),
        )  # fmt: skip

    def prompt(
        self,
        group: HeadGroup,
        new: NewTokens,
        transform: LogitTransform,
        counts: Tensor | None = None,
        limits: Tensor | None = None,
        offset: int = 0,
        factor: float = 1.0,
        lanes: int = 1,
        lane: int = 0,
    ) -> None:
        """Take Q tokens of each row, or `counts` [B], chunk after chunk, see `prompt_kernel`. Counts none.

        Args:
            group: head group whose slots are written.
            new: the tokens.
            transform: what the model does with query times key.
            counts: [B] int64.
            limits: see `limits_of`.
            offset: tokens of the same prompt before these.
            factor: on what is rotated.
            lanes: how many prompts may run at the same time,
            lane: and which of them this is.
        """
        rules = self.rules_of(group, new, transform)
        rows, tokens, device = len(new.out), new.query.shape[2], group.device
        heads, groups = rows * rules.constants["H"], rules.constants["G"]
        unpacked = decoded(group) if group.plan.kv_bits < 16 else None
        slots = group.store.slots - (unpacked is not None)
        places = max(triton.next_power_of_2(slots - 1), 16)
        split = 0 < heads * groups * lanes <= self._processors
        share = split and places >= _SHARING_WINDOW
        programs, step = heads * groups if split else heads, min(group.plan.chunk, MAX_CHUNK)
        chunk, head = max(triton.next_power_of_2(step), 16), _numbers_of_head(rules.constants)

        def space(name: str, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return self._space(f"{name} {lane}", size, device, dtype)

        arrived = space("met", heads, torch.int32)
        if split:
            arrived.zero_()
        tile = _TILE if self._shared >= _LARGE_SHARED else _TILE // 2
        twice = self._shared >= _LARGEST_SHARED and head * group.dtype.itemsize <= _USUAL_HEAD
        piece = min(places, 128 if share else 256, tile // (triton.next_power_of_2(head) * group.dtype.itemsize))
        prompt_kernel[heads, groups if split else 1](
            new.query, new.key, new.value, new.out, new.heads, counts, limits,
            **{name: x for name, x in (slots_of(group) | (unpacked or {})).items() if name not in ENCODED},
            **rules.tensors, sink_logits=transform.sinks,
            ranges=space("ranges", heads * 2 * new.key.shape[-1]) if unpacked else None,
            turned=space("turned", (heads if share else programs) * (places + chunk) * head, group.dtype),
            asked=space("asked", programs * chunk * head, group.dtype),
            shared=space("shared", heads * 2 * groups * (2 * places + chunk)),
            floats=space("floats", programs * (3 * places + 2 * chunk)),
            whole=space("whole", programs * (4 * places + chunk), torch.int32), arrived=arrived,
            **_strides(new, 0, 2, 1), tokens=tokens, offset=offset, step=step,
            **rules.numbers | {"slots": slots}, factor=factor, **rules.constants, C=chunk,
            WP=places, WC=triton.next_power_of_2(places + chunk), P=piece, SPLIT=split,
            SHARE=share, num_warps=8, num_stages=2 if share and twice else 1,
        )  # fmt: skip
        if unpacked:
            encode(group, unpacked, group.seen + offset + (tokens if counts is None else counts.view(-1, 1, 1)))

    def _space(self, name: str, size: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory that all layers use one after another, zero at first. What was too small stays: captured steps of
        other streams use it.
        """
        spaces = self._spaces.setdefault((name, device, dtype), [])
        if not spaces or spaces[-1].numel() < size:
            with torch.inference_mode(False):
                spaces.append(torch.zeros(triton.next_power_of_2(size), dtype=dtype, device=device))
        return spaces[-1]

    def rules_of(self, group: HeadGroup, new: NewTokens, transform: LogitTransform) -> _Rules:
        """The arguments of the group, made anew when something has changed."""
        kv_heads = group.index.shape[1]
        key = group.revision.number, transform[:2], new.query.shape[1]
        known = self._rules.get(group)
        if known and known[0] == key:
            return known[1]
        plan, protection, size = group.plan, group.protection, group.store.keys.shape[-1]
        value_size = group.store.values.shape[-1]
        table = None
        if group.table is not None:
            dtype = torch.float32 if group.dtype == torch.float32 else torch.float16
            rows = group.max_distance(group.store.slots + MAX_CHUNK)
            table = group.table.upto(rows, group.device, dtype).contiguous()
        tensors = {
            "table": table, "pins": bounds_of(protection.pins, group.device),
            "transient": bounds_of(protection.transient, group.device),
        }  # fmt: skip
        numbers = {
            "slots": group.store.slots, "table_rows": 0 if table is None else len(table),
            "pin_count": len(protection.pins), "transient_count": len(protection.transient),
            "recent": int(protection.recent), "sinks": int(protection.sinks), "span": int(group.span),
            "scale": float(transform.scaling), "softcap": float(transform.softcap or 0.0), "decay": float(plan.decay),
            "long_decay": LONG_TERM_DECAY, "long_weight": float(plan.long_term), "far": LONG_TERM_DISTANCE,
            "seed": plan.seed * 0x9E3779B9 % 2**32, "layer": int(group.layer), "sliding": group.sliding or 0,
        }  # fmt: skip
        rotated = 0 if table is None else table.shape[1]
        positions = _POSITIONS["absolute" if table is None else plan.positions]
        heads = kv_heads if new.heads is None else new.key.shape[1]
        constants = {
            "H": kv_heads, "G": new.query.shape[1] // heads, "D": size, "DV": value_size, "R": rotated,
            "HP": _padded(rotated // 2), "TP": _padded(size - rotated), "VP": _padded(value_size),
            "POLICY": int(POLICIES[group.rule]), "POSITIONS": int(positions), "LONG": bool(group.policy.long_term),
            "SOFTCAP": bool(transform.softcap), "SLIDING": (2 if group.chunked else 1) if group.sliding else 0,
            "BITS": plan.kv_bits, "SINKS": plan.exact_sinks, "RING": max(plan.residual, 1),
            "KP": triton.next_power_of_2(size), "PRECISION": "ieee" if group.dtype == torch.float32 else "tf32",
        }  # fmt: skip
        rules = _Rules(tensors, numbers, constants)
        self._rules[group] = key, rules
        return rules


def _new_tokens(chunk: QueryChunk) -> NewTokens:
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (chunk.query, chunk.key, chunk.value))
    out = query.new_empty(len(query), query.shape[2], query.shape[1], value.shape[-1])
    return NewTokens(query, key, value, out.transpose(1, 2))


def _strides(new: NewTokens, *dims: int) -> dict[str, int]:
    """Numbers between rows, tokens and heads."""
    names = {0: "row", 1: "head", 2: "token"}
    tensors = {"query": new.query, "key": new.key, "value": new.value, "out": new.out}
    return {f"{name}_{names[dim]}": x.stride(dim) for name, x in tensors.items() for dim in dims}


def _numbers_of_head(constants: dict[str, Any]) -> int:
    """Numbers of a head in the memory of `prompt_kernel`: both rotary halves and the rest, padded."""
    rotary, size, half, rest = (constants[name] for name in ("R", "D", "HP", "TP"))
    return (2 * half if rotary else 0) + (rest if size > rotary else 0)


def _padded(size: int) -> int:
    """A power of two of at least 16 that holds so many numbers."""
    return max(int(triton.next_power_of_2(size)), 16)
