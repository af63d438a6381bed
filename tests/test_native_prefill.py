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
from h2o_stream.cache.audit import check_slots
from h2o_stream.cache.group_rules import HeadShape
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.kernels import Kernels
from h2o_stream.cache.padding import Padding
from h2o_stream.cache.policies import Candidates
from h2o_stream.cache.protection import Protection
from h2o_stream.cache.rotations import Rotations
from h2o_stream.cache.windows import Schedule
from h2o_stream.config import CachePlan
from h2o_stream.errors import H2OStreamError
from h2o_stream.native import kernels
from h2o_stream.native.kernels import NativeKernels
from h2o_stream.runtime.rotations import rope_frequencies
from tests.in_turn import in_turn
from tests.slots import attend

POLICIES = ("h2o", "h2o-paper", "tova", "random", "sink", "recent")


class Table(Rotations):
    """Rotations as tensors, too."""

    def __init__(self, rotary: int) -> None:
        super().__init__(rope_frequencies(10_000, rotary))

    def upto(self, limit: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(self.on_cpu(limit)).to(dtype)


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


class Layer:
    """The head groups of a case: eager ones in float32, or in the case's dtype with kernels."""

    def __init__(self, case: Case, kernels: Kernels | None = None) -> None:
        self.case, self.kernels, self.groups = case, kernels, []
        heads_of_groups = case.heads or (tuple(range(case.kv_heads)),)
        for heads in heads_of_groups:
            table = None if case.plan.positions == "absolute" else Table(case.rotary)
            group = HeadGroup(case.plan, layer=3, table=table, sliding=case.sliding)
            group.schedule = case.schedule
            group.protection = Protection(case.plan.sinks, case.pins, case.plan.recent, case.transient)
            self.groups.append((group, torch.tensor(heads)))

    def attend(self, call: int) -> Tensor:
        query, key, value = (x if self.kernels else x.float() for x in self.case.inputs[call])
        grouped = query.unflatten(1, (key.shape[1], -1))
        output = query.new_empty(query.shape[0], query.shape[2], *grouped.shape[1:3], query.shape[-1])
        transform = LogitTransform(self.case.size**-0.5, self.case.softcap)
        for group, heads in self.groups:
            counts = padding(self.case.prompts[call])
            of_heads = grouped[:, heads].flatten(1, 2), key[:, heads], value[:, heads]
            mixed = attend(group, *of_heads, transform, counts, self.kernels)
            output[:, :, heads] = mixed.unflatten(2, (len(heads), -1))
        return output.flatten(2, 3)

    def held(self) -> list[dict[str, Tensor]]:
        return [by_token(group.store, group.candidates) for group, _ in self.groups]


def native_layer(library: ctypes.CDLL, case: Case) -> Layer:
    """Slots are as many as the library needs, and their keys and values begin as garbage."""
    layer, exact = Layer(case, NativeKernels(library)), case.plan.kv_bits == 16
    for group, heads in layer.groups:
        shape = HeadShape(len(heads), len(heads), case.size, case.size)
        group.allocate(shape, str(case.dtype), case.batch, case.schedule.max_held + (1 if exact else 2))
        if exact:
            group.store.keys.fill_(7.0)
            group.store.values.fill_(7.0)
    return layer


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


def compare(library: ctypes.CDLL, case: Case) -> None:
    """Run every call natively and eagerly; outputs and kept tokens must agree."""
    eager, ours = Layer(case), native_layer(library, case)
    exact, bits = case.dtype == torch.float32, case.plan.kv_bits
    for call, counts in enumerate(case.prompts):
        wanted, got = eager.attend(call), ours.attend(call).float()
        there = torch.arange(got.shape[1]) < torch.tensor(counts)[:, None]
        assert not got[~there].any()
        error, size = (got - wanted)[there], wanted[there].square().mean().sqrt()
        assert error.abs().max() <= (2e-5 if exact else 2e-2) * size
        for want, have in zip(eager.held(), ours.held(), strict=True):
            slots = have["index"].shape[-1]
            short = slots - want["index"].shape[-1]  # the eager layer uses fewer slots after a window has shrunk
            for name in want:
                actual = have[name][:, :, short:] if short > 0 else have[name]
                tolerance = 0 if name in ("index", "rank") or (name in ("keys", "values") and bits == 16) else 3e-5
                torch.testing.assert_close(actual.float(), want[name].float(), rtol=tolerance, atol=tolerance)
        for group, _ in ours.groups:
            check_slots(group, f"slots after call {call}")
            check_exact_slots(group)


def check_exact_slots(group: HeadGroup) -> None:
    """The sinks and newest tokens of a quantized cache are in their fixed slots."""
    sinks, residual = group.plan.exact_sinks, group.plan.residual
    for row, heads in enumerate(group.index.tolist() if group.exact else ()):
        for slot, token in (pair for slots in heads for pair in enumerate(slots)):
            new = token >= int(group.seen[row]) - (residual - 1)
            if 0 <= token < sinks:
                assert slot == token
            elif token >= 0 and new:
                assert slot == sinks + (token - sinks) % residual
            elif token >= 0:
                assert slot >= group.exact


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


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "num_threads", lambda: 2)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CASES)
def test_as_the_eager_layer(native: ctypes.CDLL, name: str) -> None:
    compare(native, CASES[name])


@in_turn("name", ["h2o", "rows", "4 bits", "bfloat16"])
def test_on_any_processor(portable: ctypes.CDLL, name: str) -> None:
    compare(portable, CASES[name])


@in_turn("name", ["groups of 3", "rows", "long prompt", "many heads", "4 bits", "bfloat16"])
def test_any_number_of_threads_gives_the_same(native: ctypes.CDLL, name: str, monkeypatch: Any) -> None:
    case, results = CASES[name], []
    for threads in (1, 2, 3):
        monkeypatch.setattr(kernels, "num_threads", lambda threads=threads: threads)
        layer = native_layer(native, case)
        outputs = [layer.attend(call) for call in range(len(case.prompts))]
        results.append([*outputs, *(tensor for group, _ in layer.groups for tensor in group.tensors().values())])
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_inputs_that_are_views(native: ctypes.CDLL) -> None:
    case = Case(plan())
    wanted = native_layer(native, case).attend(0)
    case.inputs[0] = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in case.inputs[0])
    assert torch.equal(native_layer(native, case).attend(0), wanted)


def test_too_few_slots_are_refused(native: ctypes.CDLL) -> None:
    layer = native_layer(native, Case(plan()))
    ((group, _),) = layer.groups
    group.schedule, group.fit = Schedule.equal(18), lambda lengths: None
    with pytest.raises(H2OStreamError, match="17 slots are too few to hold 18 tokens"):
        layer.attend(0)
    assert group.seen.tolist() == [[[15]]], "the chunks before"
