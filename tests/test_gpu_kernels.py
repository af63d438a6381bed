"""The kernels for GPUs under Triton's interpreter, against the eager cache. `tests/test_gpu.py` runs them."""

import inspect
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from h2o_stream.gpu import available
from tests.test_native_prefill import CASES, GROWN, SHRUNK, Case, Layer, check_exact_slots, plan

pytestmark = pytest.mark.skipif(os.environ.get(available.INTERPRET) != "1", reason="Triton does not interpret kernels")

STEPS = ((1,),) * 5
MORE = {
    "steps, nothing evicted": Case(plan(), prompts=((3,), *STEPS)),
    "from the first token": Case(plan(), prompts=STEPS),
    "rows that step": Case(plan("tova"), batch=3, query_heads=6, prompts=((40, 13, 2), *((1, 1, 1),) * 5)),
    "a window of 200": Case(plan(window=200, heavy=100, recent=98, chunk=64), query_heads=6, prompts=((330,), *STEPS)),
    **{
        f"{bits} bits, from the first token": Case(
            plan(kv_bits=bits), query_heads=4, size=16, rotary=8, prompts=STEPS * 5
        )
        for bits in (8, 6, 4, 2)
    },
    "4 bits, growing": Case(plan(kv_bits=4), size=16, rotary=16, schedule=GROWN),
    "6 bits, shrinking": Case(plan("tova", kv_bits=6, recent=4), size=16, rotary=16, schedule=SHRUNK),
    "4 bits, pairs of queries": Case(plan(kv_bits=4), query_heads=4, size=16, rotary=8, prompts=((40,), (1,))),
    "sinks of two": Case(plan(window=17, heavy=9), softcap=3.0, prompts=((25,), *STEPS)),
}
EAGER_ONLY = {"all at once", "sliding, all at once", "long prompt", "8 bits, all at once"}
ROUNDED = {"bfloat16"}
"""Which tokens stay may differ by rounding: `test_gpu_steps` compares errors."""


def kernels() -> Any:
    from h2o_stream.gpu.kernels import GpuKernels

    return GpuKernels(torch.device("cpu"))


def cases() -> dict[str, Case]:
    served = {name: case for name, case in CASES.items() if name not in EAGER_ONLY | ROUNDED}
    return {name: replace(case, prompts=(*case.prompts, *(((1,) * case.batch,) * 4)), inputs=[])
            for name, case in served.items()} | MORE  # fmt: skip


@pytest.mark.parametrize("name", cases())
def test_as_the_eager_layer(name: str) -> None:
    compare(cases()[name])


class Programs:
    """Runs the programs of a launch in threads, one at a time, the last one first; those of a KV head wait where they
    meet.
    """

    def __init__(self) -> None:
        from triton.runtime.interpreter import interpreter_builder

        self.builder, self.turn, self.meetings = interpreter_builder, threading.Lock(), 0
        self.barriers: dict[int, threading.Barrier] = {}

    def launch(self, executor: Any, *args: Any, **kwargs: Any) -> None:
        from triton.runtime.interpreter import _implicit_cvt, _patch_lang

        known, scope = inspect.getfullargspec(executor.fn).args, _patch_lang(executor.fn)
        found = inspect.getcallargs(executor.fn, *args, **{k: v for k, v in kwargs.items() if k in known})
        found = {name: x if name in executor.constexprs else _implicit_cvt(x) for name, x in found.items()}
        heads, members, *_ = *executor.grid, 1, 1
        self.builder.set_grid_dim(heads, members, 1)
        self.barriers = {head: threading.Barrier(members, timeout=60) for head in range(heads)}

        def program(place: tuple[int, int]) -> None:
            with self.turn:
                self.builder.set_grid_idx(*place, 0)
                executor.fn(**found)

        with ThreadPoolExecutor(heads * members) as threads:
            [*threads.map(program, reversed([*product(range(heads), range(members))]))]
        scope.restore()

    def meet(self, arrived: Any, count: Any, split: Any) -> None:
        if getattr(split, "value", split):
            place, self.meetings = self.builder.grid_idx, self.meetings + 1
            self.turn.release()
            self.barriers[int(place[0])].wait()
            self.turn.acquire()
            self.builder.set_grid_idx(*place)


@pytest.mark.parametrize(("name", "sharing"), [
    ("a window of 200", 1024), ("a window of 200", 16), ("4 bits, pairs of queries", 16),
])  # fmt: skip
def test_programs_in_another_order(monkeypatch: pytest.MonkeyPatch, name: str, sharing: int) -> None:
    """Splits that end last to first, and programs of a prompt that divide the queries, or the keys, too."""
    from triton.runtime.interpreter import GridExecutor

    programs = Programs()
    monkeypatch.setattr(GridExecutor, "__call__", lambda *args, **kwargs: programs.launch(*args, **kwargs))
    monkeypatch.setattr("h2o_stream.gpu.prompt.meet", programs.meet)
    monkeypatch.setattr("h2o_stream.gpu.kernels._SHARING_WINDOW", sharing)
    monkeypatch.setattr("h2o_stream.gpu.kernels._PARTS", 8 * sharing)  # some or one of the splits are merged at once
    compare(cases()[name], processors=1000)
    assert programs.meetings


def test_memory_of_a_stream_that_has_ended() -> None:
    """Slots are free again, and what the next one writes may have been allocated in torch's inference mode."""
    gpu = kernels()
    with torch.inference_mode():
        gpu._space("met 0", 2, torch.device("cpu"))
    layer = Layer(cases()["from the first token"], gpu)
    layer.attend(0)
    group = layer.groups[0][0]
    keys = weakref.ref(group.store.keys)
    group.reset()
    assert keys() is None
    assert not any(space.is_inference() for spaces in gpu._spaces.values() for space in spaces)


def compare(case: Case, processors: int = 0) -> None:
    gpu = kernels()
    gpu._processors = processors
    eager, ours = Layer(case), Layer(case, gpu)
    for call, counts in enumerate(case.prompts):
        wanted, got = eager.attend(call), ours.attend(call).float()
        there = torch.arange(got.shape[1]) < torch.tensor(counts)[:, None]
        error, size = (got - wanted)[there], wanted[there].square().mean().sqrt()
        assert error.abs().max() <= 2e-5 * size, call
        for want, have in zip(eager.held(), ours.held(), strict=True):
            for name in want:
                exactly = name in ("index", "rank") or (name in ("keys", "values") and case.plan.kv_bits == 16)
                torch.testing.assert_close(have[name].float(), want[name].float(), rtol=0 if exactly else 3e-5,
                                           atol=0 if exactly else 3e-5)  # fmt: skip
        for (layer, _), (theirs, _) in zip(ours.groups, eager.groups, strict=True):
            assert (layer.index.gather(2, layer.free) == -1).all()
            assert (layer.scores[layer.index < 0] == -torch.inf).all()
            assert (layer.rank[layer.index < 0] >= layer.schedule.held(max(layer.tokens.lengths))).all()
            assert layer.seen.equal(theirs.seen)
            check_exact_slots(layer)
