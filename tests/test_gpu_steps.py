"""Fused layers under Triton's interpreter, against the model's own. `tests/test_gpu.py` runs them."""

import os
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from h2o_stream import CacheConfig, attach
from h2o_stream.gpu import available, graphs
from h2o_stream.gpu.graphs import WARM_UP, GraphSteps
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.torch_modules import DTYPES
from tests.families import FAMILIES
from tests.fixtures import ids as tokens
from tests.fixtures import make_llama
from tests.test_gpu_graphs import Recording
from tests.test_gpu_kernels import products_of_bfloat16  # noqa: F401
from tests.tolerance import relative_error

pytestmark = pytest.mark.skipif(os.environ.get(available.INTERPRET) != "1", reason="Triton does not interpret kernels")

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
]


def streams(model: Any, config: CacheConfig, engine: Any, rows: int, note: str = "") -> tuple[Any, ...]:
    with attach(model, config, engine=engine) as cache:
        assert cache.engine_note.startswith(note), cache.engine_note
        ids = tokens(46, rows)
        parts = (ids[:, :37], *ids[:, 37:].split(1, 1), tokens(9, rows))
        logits = [model(part, past_key_values=cache).logits for part in parts]
        return logits, [cache.kept(layer).tolist() for layer in range(len(cache.layers))]


def check(model: Any, config: CacheConfig, rows: int, note: str = "fused") -> None:
    ours, theirs = streams(model, config, "auto", rows, note), streams(model, config, "eager", rows)
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert relative_error(a, b) < 1e-4
    assert ours[1] == theirs[1]


@pytest.mark.parametrize("name", FUSED)
def test_families(name: str) -> None:
    model = next(family for family in FAMILIES if family.name == name).make()
    check(model, CacheConfig(window=24, chunk=16), 1)


@pytest.mark.parametrize("name", ["Qwen 3 MoE", "Qwen 2 MoE", "GLM-4 MoE"])
def test_experts(name: str) -> None:
    """Steps are fused, prompts the model's own."""
    model = next(family for family in FAMILIES if family.name == name).make()
    check(model, CacheConfig(window=24, chunk=16), 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_bytes(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """No further from float32 than the eager way, by much."""
    monkeypatch.setitem(DTYPES, torch.float16, MatrixKind.BFLOAT16)  # as on a GPU
    model, config = make_llama(groups=2, layers=1, size=16), CacheConfig(window=24, chunk=16)
    exact = streams(model, config, "eager", 1)[0]
    model = model.to(dtype)
    ours, theirs = (streams(model, config, engine, 1, note)[0] for engine, note in (("auto", "fused"), ("eager", "")))
    errors = [[relative_error(a.float(), b) for a, b in zip(logits, exact, strict=True)] for logits in (ours, theirs)]
    assert sum(errors[0]) <= 1.5 * sum(errors[1])


def test_fused_steps_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a recording that refuses to read on the host; of a launch it has the arguments."""
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
    recorded = lambda forward, cache: GraphSteps(forward, cache, lambda step: Recording(cache, step))  # noqa: E731
    monkeypatch.setattr("h2o_stream.gpu.steps.GraphSteps", recorded)
    Recording.made = Recording.replays = 0
    model = make_llama(groups=2, layers=1)
    results = []
    for engine in ("auto", "eager"):
        with attach(model, CacheConfig(window=24, chunk=16, budgets="equal"), engine=engine) as cache:
            parts = (tokens(30), *tokens(7, seed=1).split(1, 1))
            results.append(torch.cat([model(part, past_key_values=cache).logits for part in parts], 1))
    assert relative_error(*results) < 1e-4
    assert (Recording.made, Recording.replays) == (1, 7 - WARM_UP)


def test_rows_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h2o_stream.gpu.steps.BLOCK", 64)
    model = make_llama(groups=2)
    check(model, CacheConfig(window=24, chunk=8), 2)
