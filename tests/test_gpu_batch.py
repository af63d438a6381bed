"""Streams on a GPU that are stepped together, each as if it were alone. `tests/test_gpu.py` runs them."""

import gc
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.engine.gpu_model import GpuModel, ServedOnGpu
from h2o_stream.errors import ConfigError, H2OStreamError
from h2o_stream.gpu import available, graphs
from h2o_stream.gpu.graphs import GraphSteps
from h2o_stream.loading.transformers_model import load
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.models.quantize import pack_model
from h2o_stream.serve.service import load_served
from tests.fixtures import make_llama, saved, shortened
from tests.served import Running, reply
from tests.test_gpu_graphs import Recording
from tests.test_gpu_steps import FUSED, OTHERS, family, recorded  # noqa: F401
from tests.tolerance import relative_error

pytestmark = pytest.mark.skipif(os.environ.get(available.INTERPRET) != "1", reason="Triton does not interpret kernels")

CONFIG = CacheConfig(window=24, chunk=16)


def made(name: str = "") -> GpuModel:
    model = family(name) if name else make_llama(heads=1, groups=2, layers=1)
    return GpuModel(model, CONFIG, lambda _: None)


def text(count: int, seed: int) -> list[int]:
    return [3 + (7 * i + 11 * seed + i * i % 5) % 50 for i in range(count)]


def opened(
    model: GpuModel, count: int, shortest: int = 20, **settings: Any
) -> tuple[list[ServedOnGpu], list[ServedOnGpu]]:
    """Streams of their own lengths, windows and pins, and the same again."""
    pairs = []
    for number in range(count):
        one, other = (model.serve(replace(CONFIG, window=(24, 28)[number % 2], **settings)) for _ in range(2))
        one.cache.pin(number, number + 2)
        one.forward(text(shortest + 9 * number, number))
        other.load_state_dict(one.state_dict())
        pairs.append((one, other))
    alone, together = zip(*pairs, strict=True)
    return [*alone], [*together]


def taken(batch: Any, streams: Sequence[ServedOnGpu], tokens: Sequence[Sequence[int]], num_steps: int) -> Any:
    """Logits of streams of which the first ones take a token, and others several."""
    steps, plans = [served.stepper for served in streams], []
    for at, (served, part) in enumerate(zip(streams, tokens, strict=True)):
        served.cache.prepare(len(part))
        if at < num_steps:
            assert served.stepper.begin_step(numpy.array(part))
        else:
            plans.append(served.stepper.begin_prompt(numpy.array([part])))
            assert plans[-1].chunk == 16
    reading = batch.read(steps[num_steps:], tokens[num_steps:], plans) if plans else [()]
    return [*batch.step(steps[:num_steps]), *[*reading][-1]]


def check(ours: Sequence[ServedOnGpu], theirs: Sequence[ServedOnGpu]) -> None:
    """States are the same, up to rounding."""
    for one, other in zip(ours, theirs, strict=True):
        a, b = one.state_dict(), other.state_dict()
        assert a.keys() == b.keys()
        for name in a.keys() - {"checksums"}:
            if a[name].dtype.kind == "f":
                numpy.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-4)
            else:
                assert numpy.array_equal(a[name], b[name]), name


@pytest.mark.parametrize(("name", "counts"), [
    ("", (1, 1, 21, 7)), ("Qwen 2 MoE", (1, 1, 4)),
    *(pytest.param(name, (1, 1, 30), marks=pytest.mark.exhaustive) for name in (*FUSED, *OTHERS)),
])  # fmt: skip
def test_together_as_alone(name: str, counts: tuple[int, ...]) -> None:
    """Tokens beside prompts of any lengths, of streams that have begun and one that has not."""
    model = made(name)
    batch, (alone, ours) = model.make_batch(), opened(model, len(counts) - 1)
    alone, ours = [*alone, model.serve(CONFIG)], [*ours, model.serve(CONFIG)]
    for step in range(2 if name else 1):
        tokens = [text(count, 100 * step + number) for number, count in enumerate(counts)]
        wanted = [served.forward(part) for served, part in zip(alone, tokens, strict=True)]
        for a, b in zip(taken(batch, ours, tokens, 2), wanted, strict=True):
            assert relative_error(torch.tensor(a), torch.tensor(b)) < 1e-4
    check(ours, alone)


@pytest.mark.parametrize("bits", [16, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_few_rows_are_those_of_each_alone(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """Bit for bit: logits, and what states continue with. Streams with the same window are one launch of a layer."""
    from h2o_stream.gpu.kernels import GpuKernels

    model, launches, step = made(), list[int](), GpuKernels.step
    batch, (alone, ours) = model.make_batch(), opened(model, 3, kv_bits=bits)
    tokens = [[5], [6], [7]]
    wanted = [served.forward(part) for served, part in zip(alone, tokens, strict=True)]
    with monkeypatch.context() as patch:
        patch.setattr(GpuKernels, "step", lambda *args: launches.append(len(args[-1])) or step(*args))
        assert numpy.array_equal(taken(batch, ours, tokens, 3), wanted)
    assert launches == [2, 1]
    moved = model.serve(replace(CONFIG, window=28, kv_bits=bits))
    moved.load_state_dict(ours[1].state_dict())
    assert numpy.array_equal(moved.forward([7]), alone[1].forward([7]))


def test_streams_join_and_leave(monkeypatch: pytest.MonkeyPatch, recorded: type[Recording]) -> None:  # noqa: F811
    """Steps of streams that stay together are captured; what has left is freed."""

    def captured(step: Any, caches: Any) -> GraphSteps:
        return GraphSteps(step, caches, lambda run: Recording(caches, run))

    monkeypatch.setattr("h2o_stream.gpu.batch.GraphSteps", captured)
    monkeypatch.setattr(graphs, "WARM_UP", 1)
    monkeypatch.setattr(graphs, "why_not", lambda *_: "")
    model = made()
    batch, (alone, ours) = model.make_batch(), opened(model, 3, 29, budgets="equal")
    for chosen in ((0, 1), (1, 2)):
        for step in range(3):
            tokens = [[5 + step + number] for number in chosen]
            for number, part in zip(chosen, tokens, strict=True):
                alone[number].forward(part)
            replays = recorded.replays
            logits = taken(batch, [ours[number] for number in chosen], tokens, 2)
        assert recorded.replays > replays
    assert numpy.allclose(alone[2].forward([9]), taken(batch, [ours[2]], [[9]], 1)[0], atol=1e-4)
    check(ours, alone)
    gone = weakref.ref(ours.pop().cache)
    del alone, logits
    gc.collect()
    assert gone() is None


def test_memory_of_captured_steps_stays() -> None:
    """Those of a stream, when another one has a larger window."""
    from h2o_stream.gpu.kernels import GpuKernels

    kernels, device = GpuKernels(torch.device("cpu")), torch.device("cpu")
    small = weakref.ref(kernels._space("parts", 10, device))
    assert kernels._space("parts", 1000, device).numel() >= 1000
    assert small() is not None


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    served = made().serve(CONFIG)
    served.cache.prepare(2)
    assert served.stepper.begin_prompt(numpy.array([[5, 64]])) is None
    monkeypatch.setattr("h2o_stream.attachment.gpu_steps._trial", lambda *_: "")
    packed = pack_model(make_llama(layers=1), "int8")
    with pytest.raises(H2OStreamError, match="its weights are packed for a CPU"):
        GpuModel(packed, CONFIG, lambda _: None)
    other = LoadedModel("x", make_llama(layers=1), None, why_transformers="it computes on a GPU")
    monkeypatch.setattr("h2o_stream.serve.service.load_model", lambda *_: other)
    with pytest.raises(ConfigError, match=r"^h2o-serve cannot serve org/x on a GPU: .*absolute.*; use --device cpu$"):
        load_served(ModelConfig("org/x"), CacheConfig(positions="absolute"))


def test_served_replies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: Any) -> None:
    """By a server: at the same time as alone, continued after sleep, and branched."""
    few = shortened(tokenizer, 320)
    folder = saved(make_llama(heads=1, groups=2, layers=1, vocab=len(few)), few, tmp_path / "model")

    def loaded(config: ModelConfig, cache: CacheConfig, *_: Any) -> LoadedModel:
        return replace(load(config, cache), why_transformers="it computes on a GPU", system="x")

    monkeypatch.setattr("h2o_stream.serve.service.load_model", loaded)
    config = ModelConfig(str(folder), dtype="float32", device="cpu", quantize="none")
    with Running(tmp_path / "served", config, CacheConfig(window=48, chunk=64), awake=2, running=2) as server:
        first = reply(server.say("a", max_tokens=1))
        turns = [("a", first, "b"), ("c",)]
        with ThreadPoolExecutor(2) as executor:
            answers = [*executor.map(lambda texts: server.say(*texts, max_tokens=2), turns)]
        assert [answer["h2o"]["origin"] for answer in answers] == ["continued", "new"]
        server.say("d", max_tokens=1)
        again = server.say(*turns[0], max_tokens=2, store=False)
        assert again["h2o"]["origin"] == "branched"
        assert reply(again) == reply(answers[0])
