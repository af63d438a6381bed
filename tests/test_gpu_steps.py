"""Fused layers under Triton's interpreter, against the model's own. `tests/test_gpu.py` runs them."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from h2o_stream import CacheConfig, attach
from h2o_stream.cache.recurrent import states_of
from h2o_stream.gpu import available, graphs
from h2o_stream.gpu.graphs import WARM_UP, GraphSteps
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.torch_modules import DTYPES
from tests.families import EXPERTS, FAMILIES, GROUPED, tiny
from tests.fixtures import ids as tokens
from tests.fixtures import make_llama
from tests.test_gpu_graphs import Recording
from tests.tolerance import relative_error

pytestmark = pytest.mark.skipif(os.environ.get(available.INTERPRET) != "1", reason="Triton does not interpret kernels")

HYBRIDS = [
    *("LFM2", "LFM3", "LFM2 MoE", "Qwen 3.5", "Qwen3-Next", "Falcon-H1", "Bamba", "Granite 4", "Nemotron-H"),
    "OLMo hybrid",
]

FUSED = [
    "Llama 3",
    "Qwen 2, YaRN",
    "Qwen 3",
    "Gemma 2",
    "Gemma 3",
    "GPT-NeoX",
    "Mistral, sliding",
    "SmolLM3",
    "GLM",
    "Cohere 2",
    "Qwen 3 MoE",
    "Qwen 2 MoE",
    "GLM-4 MoE",
    "gpt-oss",
    "Llama 4",
    "MiMo V2",
    "nanochat",
    "DeepSeek V3",
    "Gemma 4",
    *HYBRIDS,
]


OTHERS = {
    "BitNet": tiny("BitNet", **GROUPED),
    "OLMo": tiny("Olmo", **GROUPED, clip_qkv=0.3),
    "Llama 4, hot": tiny("Llama4", "Llama4Text", **GROUPED, **EXPERTS, intermediate_size_mlp=32, floor_scale=8,
                         attention_chunk_size=10, no_rope_layers=[1, 0]),
}  # fmt: skip
"""Families that norm or clip what the others do not, and with factors on queries that are not 1."""


def family(name: str) -> Any:
    return OTHERS[name]() if name in OTHERS else next(family.make for family in FAMILIES if family.name == name)()


def streams(model: Any, config: CacheConfig, engine: Any, rows: int, note: str = "") -> tuple[Any, ...]:
    with attach(model, config, engine=engine) as cache:
        assert cache.engine_note.startswith(note), cache.engine_note
        ids = tokens(46, rows)
        parts = (ids[:, :37], *ids[:, 37:].split(1, 1), tokens(9, rows))
        logits = [model(part, past_key_values=cache).logits for part in parts]
        kept = [cache.kept(layer).tolist() for layer in range(len(cache.layers))]
        return logits, kept, [x.clone() for layer in cache.layers for x in states_of(layer).values()]


def check(model: Any, config: CacheConfig, rows: int, note: str = "fused") -> None:
    ours, theirs = streams(model, config, "auto", rows, note), streams(model, config, "eager", rows)
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert relative_error(a, b) < 1e-4
    assert ours[1] == theirs[1]
    for state, exact in zip(ours[2], theirs[2], strict=True):
        assert state.dtype == exact.dtype
        assert relative_error(state, exact) < 1e-4


@pytest.mark.parametrize("name", [*FUSED, *OTHERS])
def test_families(name: str) -> None:
    check(family(name), CacheConfig(window=24, chunk=16), 1)


@pytest.mark.parametrize(("bits", "rows"), [(8, 1), (6, 1), (4, 2), (2, 1)])
def test_few_bits(bits: int, rows: int) -> None:
    check(make_llama(groups=2, layers=1, size=16), CacheConfig(window=24, chunk=16, kv_bits=bits), rows)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 16), (torch.float16, 16), (torch.bfloat16, 8)])
def test_two_bytes(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bits: int) -> None:
    """No further from float32 than the eager way, by much."""
    monkeypatch.setitem(DTYPES, torch.float16, MatrixKind.BFLOAT16)  # as on a GPU
    model, config = make_llama(groups=2, layers=1, size=16), CacheConfig(window=24, chunk=16, kv_bits=bits)
    exact = streams(model, config, "eager", 1)[0]
    model = model.to(dtype)
    ours, theirs = (streams(model, config, engine, 1, note)[0] for engine, note in (("auto", "fused"), ("eager", "")))
    errors = [[relative_error(a.float(), b) for a, b in zip(logits, exact, strict=True)] for logits in (ours, theirs)]
    assert sum(errors[0]) <= 1.5 * sum(errors[1])


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Recording]:
    """Captured by a recording that refuses to read on the host; of a launch it has the arguments."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def recorded_launch(self: Any, *args: Any, **kwargs: Any) -> None:
        mode = _get_current_dispatch_mode()
        if mode is not None:
            mode.calls.append((launch, (self, *args), kwargs, None))
        with _disable_current_modes():
            launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", recorded_launch)
    monkeypatch.setattr(graphs, "why_not", lambda cache, device: "")
    monkeypatch.setattr(
        "h2o_stream.gpu.steps.GraphSteps",
        lambda forward, cache, **more: GraphSteps(forward, cache, lambda step: Recording(cache, step), **more),
    )
    Recording.made = Recording.replays = 0
    return Recording


@pytest.mark.parametrize(("name", "rows", "bits"), [
    ("", 1, 16), ("", 1, 4), ("Qwen 2 MoE", 5, 16), ("LFM2", 1, 16), ("Qwen 3.5", 1, 16), ("Bamba", 2, 16),
    ("gpt-oss", 1, 16), ("Llama 4, hot", 2, 16),
])  # fmt: skip
def test_fused_steps_are_captured(recorded: type[Recording], name: str, rows: int, bits: int) -> None:
    model = family(name) if name else make_llama(groups=2, layers=1)
    results = []
    for engine in ("auto", "eager"):
        config = CacheConfig(window=24, chunk=16, budgets="equal", kv_bits=bits)
        with attach(model, config, engine=engine) as cache:
            parts = (tokens(30, rows), *tokens(7, rows, 1).split(1, 1))
            results.append(torch.cat([model(part, past_key_values=cache).logits for part in parts], 1))
    assert relative_error(*results) < 1e-4
    assert (recorded.made, recorded.replays) == (1, 7 - WARM_UP)


@pytest.mark.parametrize(("name", "rows", "bits"), [
    ("Llama 3", 1, 16), ("Llama 3", 1, 4), ("Qwen 3", 2, 16), ("Qwen 2 MoE", 1, 16),
    ("Qwen 3.5", 1, 16), ("Bamba", 2, 16), ("gpt-oss", 1, 16), ("DeepSeek V3", 1, 16),
])  # fmt: skip
def test_what_kernels_do_before_they_wait(monkeypatch: pytest.MonkeyPatch, name: str, rows: int, bits: int) -> None:
    """With PDL, the kernels before may still run then: nothing is stored, or loaded that they store in this step.

    A step begins with an embedding, whose kernel waits for all before it, as any of torch does.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    from h2o_stream.gpu import block_gemv, decode, experts, mixer_kernels, products

    stored, early, waits = set[int](), [False], list[int]()

    def begin(*_: Any) -> None:
        early[0] = True

    def wait(*_: Any) -> None:
        early[0] = False
        waits.append(len(stored))

    def watched(method: str, stores: bool) -> None:
        run = getattr(InterpreterBuilder, method)
        where, mask_at = (1, 3) if method == "create_atomic_rmw" else (0, 1 if method == "create_masked_load" else 2)

        def call(self: Any, *args: Any) -> Any:
            addresses = {*args[where].data[args[mask_at].data.astype(bool)].tolist()}
            assert not (early[0] and (stores or addresses & stored)), method
            if stores:
                stored.update(addresses)
            return run(self, *args)

        monkeypatch.setattr(InterpreterBuilder, method, call)

    def waiting(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            stored.clear()
            return run(*args, **kwargs)

        return call

    for method in ("create_masked_load", "create_masked_store", "create_atomic_rmw"):
        watched(method, method != "create_masked_load")
    for module in (block_gemv, decode, experts, mixer_kernels, products):
        monkeypatch.setattr(module, "gdc_launch_dependents", begin)
        monkeypatch.setattr(module, "gdc_wait", wait)
    monkeypatch.setattr(available, "overlaps", lambda device: True)
    for place, function in ((torch.nn.functional, "embedding"), (torch, "zeros")):
        monkeypatch.setattr(place, function, waiting(getattr(place, function)))
    model = family(name)
    check(model, CacheConfig(window=24, chunk=16, kv_bits=bits), rows)
    assert max(waits) > 0


def test_rows_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h2o_stream.gpu.steps.BLOCK", 64)
    model = make_llama(groups=2)
    check(model, CacheConfig(window=24, chunk=8), 2)
