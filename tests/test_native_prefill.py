"""Native prefill against `HeadGroup`: outputs, kept tokens, scores, and slot layout."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_stream.cache.attention import LogitTransform
from h2o_stream.cache.group_rules import HeadShape
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.kernels import Kernels
from h2o_stream.cache.padding import Padding
from h2o_stream.cache.policies import Candidates
from h2o_stream.cache.protection import Protection
from h2o_stream.cache.quantized_store import QuantizedStore
from h2o_stream.cache.store import Store
from h2o_stream.cache.windows import Schedule
from h2o_stream.config import LONG_TERM_DECAY, LONG_TERM_DISTANCE, CachePlan
from h2o_stream.native.abi import TOO_FEW_SLOTS, AttentionLayer, PolicyKind, PositionMode, Slots
from tests.in_turn import in_turn
from tests.native_builds import native, portable  # noqa: F401
from tests.slots import attend

POLICIES = {"h2o": 0, "h2o-paper": 0, "tova": 1, "random": 2, "sink": 3, "recent": 3}
POSITIONS = {"gap": PositionMode.GAP, "rolling": PositionMode.ROLLING, "absolute": PositionMode.ABSOLUTE}
FIELDS = {"long_term_scores": "long_term"}


class Table:
    """Cosines and sines by distance, in the format of `RotaryTable`."""

    def __init__(self, rotary: int) -> None:
        angles = torch.arange(4096)[:, None] * 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
        self.values = torch.cat((angles.cos(), angles.sin()), -1)

    def upto(self, limit: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype)

    def on_cpu(self, limit: int) -> Tensor:
        return self.values


@dataclass
class Case:
    """A layer and the prompts it processes."""

    plan: CachePlan
    batch: int = 1
    query_heads: int = 2
    kv_heads: int = 2
    size: int = 8
    rotary: int = 8
    sliding: int | None = None
    softcap: float | None = None
    pins: tuple[range, ...] = ()
    transient: tuple[range, ...] = ()
    schedule: Schedule | None = None
    prompts: tuple[tuple[int, ...], ...] = ((40,), (9,), (1,), (23,))
    """New tokens of each stream, for each call."""
    dtype: torch.dtype = torch.float32
    heads: tuple[tuple[int, ...], ...] = ()
    """KV heads of each group; empty for one group of all heads."""
    inputs: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        self.schedule = self.schedule or Schedule.equal(self.plan.window)
        for counts in self.prompts:
            shapes = [(self.batch, heads, max(counts), self.size) for heads in (self.query_heads, *2 * [self.kv_heads])]
            query, key, value = (torch.randn(shape) for shape in shapes)
            self.inputs.append(((2 * query).to(self.dtype), key.to(self.dtype), value.to(self.dtype)))


def plan(policy: str = "h2o", **changes: Any) -> CachePlan:
    long_term = 2.0 if policy == "h2o" else 0.0
    decay = 0.99 if policy == "h2o" else 1.0
    sinks = 0 if policy == "recent" else 2
    made = CachePlan(policy, 16, sinks, 8, 14 - 8 + 2 - sinks, decay, "gap", 5, 5, seed=7, long_term=long_term)
    if policy in ("sink", "recent"):
        made = replace(made, heavy=0, recent=16 - sinks)
    return replace(made, **changes)


def padding(counts: Sequence[int]) -> Padding | None:
    if min(counts) == max(counts):
        return None
    there = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    return Padding.of(there.long(), len(counts), max(counts))


class Eager:
    """Runs the case with `HeadGroup`s in float32, or through other kernels in the case's dtype."""

    def __init__(self, case: Case, kernels: Kernels | None = None) -> None:
        self.kernels = kernels
        groups = case.heads or (tuple(range(case.kv_heads)),)
        self.case, self.layers = case, []
        for heads in groups:
            table = None if case.plan.positions == "absolute" else Table(case.rotary)
            layer = HeadGroup(case.plan, layer=3, table=table, sliding=case.sliding)
            layer.schedule = case.schedule
            layer.protection = Protection(case.plan.sinks, case.pins, case.plan.recent, case.transient)
            self.layers.append((layer, torch.tensor(heads)))

    def attend(self, call: int) -> Tensor:
        query, key, value = (x if self.kernels else x.float() for x in self.case.inputs[call])
        grouped = query.unflatten(1, (key.shape[1], -1))
        output = query.new_empty(query.shape[0], query.shape[2], *grouped.shape[1:3], query.shape[-1])
        transform = LogitTransform(self.case.size**-0.5, self.case.softcap)
        for layer, heads in self.layers:
            counts = padding(self.case.prompts[call])
            of_heads = grouped[:, heads].flatten(1, 2), key[:, heads], value[:, heads]
            mixed = attend(layer, *of_heads, transform, counts, self.kernels)
            output[:, :, heads] = mixed.unflatten(2, (len(heads), -1))
        return output.flatten(2, 3)

    def held(self) -> list[dict[str, Tensor]]:
        return [by_token(layer.store, layer.candidates) for layer, _ in self.layers]


def by_token(store: Any, slots: Candidates) -> dict[str, Tensor]:
    """The contents of slots by token, oldest first, after the empty slots."""
    index, scores, long_term = slots.index, slots.scores, slots.long_term_scores
    order = index.sort(-1).indices
    keys, values = store.read_exactly(index.shape[-1])
    empty = index < 0
    books = {
        "index": index,
        "rank": slots.rank.masked_fill(empty, -1),
        "scores": scores.masked_fill(empty, 0),
        "long_term": torch.zeros_like(scores) if long_term is None else long_term.masked_fill(empty, 0),
    }
    result = {name: book.gather(-1, order) for name, book in books.items()}
    for name, x in (("keys", keys.float()), ("values", values.float())):
        result[name] = x.masked_fill(empty[..., None], 0).gather(2, order[..., None].expand(x.shape))
    return result


class Native:
    """Runs the case with the library."""

    def __init__(self, library: ctypes.CDLL, case: Case, threads: int = 2) -> None:
        self.library, self.case, self.threads = library, case, threads
        plan, self.alive = case.plan, []
        exact = (0, 0) if plan.kv_bits == 16 else (plan.exact_sinks, plan.residual)
        bfloat16 = case.dtype == torch.bfloat16
        self.layer = AttentionLayer(
            case.query_heads, case.kv_heads, case.size, case.size, case.size**-0.5, case.softcap or 0.0,
            POLICIES[plan.policy] if plan.heavy else PolicyKind.RECENCY, POSITIONS[plan.positions],
            plan.decay, plan.long_term, LONG_TERM_DECAY, LONG_TERM_DISTANCE, plan.sinks,
            case.sliding or 0, plan.seed, 3,
            self.address(Table(case.rotary).values), 4096, case.rotary, bfloat16, plan.kv_bits, *exact,
        )  # fmt: skip
        slots = case.schedule.max_held + (1 if plan.kv_bits == 16 else 2)
        self.groups = case.heads or (tuple(range(case.kv_heads)),)
        self.tensors = [[self.made(len(heads), slots) for heads in self.groups] for _ in range(case.batch)]
        filled = [self.slots(group, heads, slots) for row in self.tensors
                  for group, heads in zip(row, self.groups, strict=True)]  # fmt: skip
        self.slots_of_streams = (Slots * len(filled))(*filled)

    def address(self, tensor: Tensor) -> int:
        self.alive.append(tensor)
        return tensor.data_ptr()

    def made(self, heads: int, slots: int) -> dict[str, Tensor]:
        group, size = HeadGroup(self.case.plan), self.case.size
        group.allocate(HeadShape(heads, heads, size, size), str(self.case.dtype), 1, slots)
        if self.case.plan.kv_bits == 16:
            group.store.keys.fill_(7.0)
            group.store.values.fill_(7.0)
        tensors = {FIELDS.get(name, name): tensor[0].clone() for name, tensor in group.tensors().items()}
        return tensors | {name: tensors[name].squeeze(-1) for name in ("free", "seen")}

    def slots(self, tensors: dict[str, Tensor], heads: tuple[int, ...], slots: int) -> Slots:
        numbers = self.address(torch.tensor(heads, dtype=torch.int32))
        plan, addresses = self.case.plan, {name: self.address(tensor) for name, tensor in tensors.items()}
        ranges = {"pins": self.case.pins, "transient": self.case.transient}
        bounds = {name: torch.tensor([(x.start, x.stop) for x in found]).long() for name, found in ranges.items()}
        return Slots(
            **addresses, **{name: self.address(tensor) for name, tensor in bounds.items()},
            heads=numbers, head_count=len(heads), slot_count=slots, recent=plan.recent, span=plan.span,
            pin_count=len(self.case.pins), transient_count=len(self.case.transient),
        )  # fmt: skip

    def attend(self, call: int, status: int = 0) -> Tensor:
        case, counts = self.case, self.case.prompts[call]
        query, key, value = case.inputs[call]
        new, chunk = query.shape[2], case.plan.chunk or query.shape[2]
        starts = range(0, new, chunk)
        windows = [
            case.schedule.held(int(tensors["seen"]) + min(start + chunk, count))
            for count, row in zip(counts, self.tensors, strict=True)
            for tensors in row
            for start in starts
        ]
        assert all(x.stride(-1) == 1 for x in (query, key, value))
        strides = [x.stride(dim) for x in (query, key, value) for dim in range(3)]
        output = torch.full((case.batch, new, case.query_heads, case.size), 9.0, dtype=case.dtype)

        def array(numbers: Sequence[int]) -> Any:
            return (ctypes.c_int64 * len(numbers))(*numbers)

        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (query, key, value)]
        call_ = self.library.h2o_prefill
        call_.restype = ctypes.c_int64
        result = call_(
            ctypes.byref(self.layer), self.slots_of_streams, ctypes.c_int64(len(self.groups)),
            ctypes.c_int64(case.batch), array(counts), array(windows), ctypes.c_int64(case.plan.chunk), *pointers,
            array(strides), ctypes.c_int64(new), ctypes.c_int64(case.dtype == torch.bfloat16),
            ctypes.c_void_p(output.data_ptr()), ctypes.c_int64(self.threads),
        )  # fmt: skip
        assert result == status
        return output

    def stacked(self, group: int, name: str) -> Tensor:
        return torch.stack([row[group][name] for row in self.tensors])

    def held(self) -> list[dict[str, Tensor]]:
        result = []
        for group in range(len(self.groups)):
            book = {name: self.stacked(group, name) for name in self.tensors[0][group]}
            bits, sinks = self.case.plan.kv_bits, self.layer.exact_sinks
            store = Store(book) if bits == 16 else QuantizedStore(book, bits, sinks)
            held = Candidates(book["scores"], book["index"], book["rank"], book["seen"], book.get("long_term"))
            result.append(by_token(store, held))
        return result


def compare(library: ctypes.CDLL, case: Case, threads: int = 2) -> None:
    """Run every call natively and eagerly; outputs and kept tokens must agree."""
    eager, layer = Eager(case), Native(library, case, threads)
    exact, bits = case.dtype == torch.float32, case.plan.kv_bits
    for call, counts in enumerate(case.prompts):
        wanted, got = eager.attend(call), layer.attend(call).float()
        there = torch.arange(got.shape[1]) < torch.tensor(counts)[:, None]
        assert not got[~there].any()
        error, size = (got - wanted)[there], wanted[there].square().mean().sqrt()
        assert error.abs().max() <= (2e-5 if exact else 2e-2) * size
        for group, (want, have) in enumerate(zip(eager.held(), layer.held(), strict=True)):
            slots = have["index"].shape[-1]
            short = slots - want["index"].shape[-1]  # the eager layer uses fewer slots after a window has shrunk
            for name in want:
                actual = have[name][:, :, short:] if short > 0 else have[name]
                tolerance = 0 if name in ("index", "rank") or (name in ("keys", "values") and bits == 16) else 3e-5
                torch.testing.assert_close(actual.float(), want[name].float(), rtol=tolerance, atol=tolerance)
            check_seats(layer, group)


def check_seats(layer: Native, group: int) -> None:
    """Free slots are empty, and the sinks and newest tokens of a quantized cache are in their fixed slots."""
    index, free, seen = (layer.stacked(group, name) for name in ("index", "free", "seen"))
    exact_sinks, residual = layer.layer.exact_sinks, layer.layer.residual
    exact = exact_sinks + residual
    assert (index.gather(2, free[..., None]) == -1).all()
    assert (layer.stacked(group, "scores")[index < 0] == -torch.inf).all()
    assert (layer.stacked(group, "rank")[index < 0] == index.shape[-1]).all()
    if layer.case.plan.kv_bits == 16:
        return
    assert (free >= exact).all()
    for row, heads in enumerate(index.tolist()):
        for slots in heads:
            for slot, token in enumerate(slots):
                new = token >= int(seen[row]) - (residual - 1)
                if 0 <= token < exact_sinks:
                    assert slot == token
                elif token >= 0 and new:
                    assert slot == exact_sinks + (token - exact_sinks) % residual
                elif token >= 0:
                    assert slot >= exact


GROWN = Schedule(16, (16, 17, 17, 18, 18, 19), 20)
SHRUNK = Schedule(16, (16, 15, 15, 14, 13, 13), 12)

CASES: dict[str, Case] = {
    **{policy: Case(plan(policy)) for policy in POLICIES},
    "rolling": Case(plan(positions="rolling")),
    "absolute": Case(plan(positions="absolute"), softcap=2.0),
    "all at once": Case(plan(chunk=0), prompts=((90,), (30,), (3,))),
    "chunks of 64": Case(plan(window=130, heavy=64, recent=64, chunk=64), prompts=((300,), (70,))),
    "sliding": Case(plan(), sliding=7),
    "sliding, all at once": Case(plan(chunk=0, positions="rolling"), sliding=33, prompts=((150,), (70,))),
    "softcap": Case(plan(), softcap=1.5),
    "pins": Case(plan(recent=4), pins=(range(5, 8), range(20, 21))),
    **{
        f"transient, {policy}": Case(
            plan(policy, recent=6),
            transient=(range(9), range(17, 24), range(41, 60)),
            pins=(range(5, 8), range(20, 21)),
            batch=2,
            prompts=((40, 31), (9, 3), (1, 1), (23, 30)),
        )
        for policy in POLICIES
    },
    "transient, 4 bits": Case(plan(kv_bits=4, long_term=0.0), size=16, rotary=16, transient=(range(5, 24),)),
    "groups of 3": Case(plan(), query_heads=6, size=64, rotary=64),
    "groups of 7, partial rotary": Case(plan("tova"), query_heads=7, kv_heads=1, size=80, rotary=32),
    "many heads": Case(plan(), query_heads=11, kv_heads=11, size=24, rotary=24, batch=2, prompts=((30, 30), (9, 9))),
    "rows": Case(plan(), batch=3, prompts=((40, 13, 1), (4, 9, 0), (1, 1, 1))),
    "rows of tova": Case(plan("tova"), batch=3, prompts=((40, 13, 0), (0, 9, 6))),
    "long prompt": Case(plan(chunk=0), query_heads=6, size=16, rotary=16, prompts=((700,), (5,))),
    "growing": Case(plan(), schedule=GROWN),
    "shrinking": Case(plan(recent=4), schedule=SHRUNK),
    "groups of heads": Case(plan(), query_heads=8, kv_heads=4, heads=((2, 0), (3,), (1,))),
    "groups of heads that draw": Case(plan("random"), kv_heads=4, query_heads=4, heads=((2, 0), (3, 1))),
    **{f"{bits} bits": Case(plan(kv_bits=bits, long_term=0.0), size=16, rotary=16) for bits in (8, 6, 4, 2)},
    "6 bits, parts of vectors": Case(plan(kv_bits=6), size=40, rotary=40),
    "8 bits, all at once": Case(plan(kv_bits=8, chunk=0, recent=14, heavy=0), prompts=((60,), (60,), (1,))),
    "4 bits, rows": Case(plan(kv_bits=4), batch=2, prompts=((40, 3), (4, 5), (9, 30))),
    "bfloat16": Case(plan(), query_heads=6, size=64, rotary=64, dtype=torch.bfloat16),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CASES)
def test_as_the_eager_layer(native: ctypes.CDLL, name: str) -> None:  # noqa: F811
    compare(native, CASES[name])


@in_turn("name", ["h2o", "rows", "4 bits", "bfloat16"])
def test_on_any_processor(portable: ctypes.CDLL, name: str) -> None:  # noqa: F811
    compare(portable, CASES[name])


@in_turn("name", ["groups of 3", "rows", "long prompt", "many heads", "4 bits", "bfloat16"])
def test_any_number_of_threads_gives_the_same(native: ctypes.CDLL, name: str) -> None:  # noqa: F811
    case, results = CASES[name], []
    for threads in (1, 2, 3):
        layer = Native(native, case, threads)
        outputs = [layer.attend(call) for call in range(len(case.prompts))]
        results.append([*outputs, *(tensor for row in layer.tensors for group in row for tensor in group.values())])
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_inputs_that_are_views(native: ctypes.CDLL) -> None:  # noqa: F811
    case = Case(plan())
    wanted = Native(native, case).attend(0)
    case.inputs[0] = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in case.inputs[0])
    assert torch.equal(Native(native, case).attend(0), wanted)


def test_too_few_slots_are_refused(native: ctypes.CDLL) -> None:  # noqa: F811
    layer = Native(native, Case(plan()))
    layer.slots_of_streams[0].slot_count = 16
    layer.attend(0, status=TOO_FEW_SLOTS)
    assert not layer.tensors[0][0]["seen"].any()
