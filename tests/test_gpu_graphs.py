"""Captured steps, as far as a CPU can tell: what is captured reads nothing on the host, and replays go on exactly.

A recording here is a list of operations and the tensors they had: a replay runs these again, and no Python between
them, and writes their results where they were. Capturing refuses what a CUDA graph cannot hold, and leaves the cache as
it was.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from h2o_stream import CacheConfig, attach
from h2o_stream.cache.quantized_store import QuantizedStore
from h2o_stream.cache.recurrent import states_of
from h2o_stream.gpu import available, graphs
from h2o_stream.gpu.graphs import WARM_UP, GraphSteps
from tests.families import FAMILIES
from tests.fixtures import ids as tokens
from tests.fixtures import make_llama, thinned, with_exhaustive
from tests.tolerance import relative_error

aten = torch.ops.aten

FROM_HOST = {
    aten._local_scalar_dense, aten.equal, aten.lift_fresh, aten.lift_fresh_copy, aten.masked_select, aten.nonzero,
}  # fmt: skip
"""Operations that read numbers on the host, make a tensor of numbers from there, or whose shapes depend on data."""


class HostFree(TorchDispatchMode):
    """Refuses operations that a captured graph cannot hold, and lists the others."""

    def __init__(self, refused: set[Any] = FROM_HOST) -> None:
        super().__init__()
        self.refused = refused
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func.overloadpacket is aten.index and any(x is not None and x.dtype == torch.bool for x in args[1])
        if func.overloadpacket in self.refused or by_mask:
            raise RuntimeError(f"{func} while a step is captured")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class Recording:
    """Stands for a CUDA graph."""

    made = 0
    replays = 0

    def __init__(self, cache: Any, step: Callable[[], Tensor]) -> None:
        recurrent = getattr(cache, "recurrent_layers", ())
        written = [group.tensors() for group in cache.head_groups] + [*map(states_of, recurrent)]
        before = [(x, x.clone()) for tensors in written for x in tensors.values()]
        try:
            with HostFree() as mode:
                self.logits = step()
        finally:
            for tensor, value in before:
                tensor.copy_(value)
        self._calls = mode.calls
        Recording.made += 1

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, results in self._calls:
            for old, new in zip(tree_leaves(results), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # no view, and not in place
                    old.copy_(new)
        Recording.replays += 1


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Recording]:
    """Steps of models on the CPU are captured; counts the recordings and replays."""
    monkeypatch.setattr(graphs, "why_not", lambda cache, device: "")
    monkeypatch.setattr(
        graphs,
        "GraphSteps",
        lambda forward, cache, **more: GraphSteps(forward, cache, lambda step: Recording(cache, step), **more),
    )
    monkeypatch.setattr("h2o_stream.attachment.gpu_steps.serves", lambda model: True)
    monkeypatch.setattr(available, "why_not", lambda device: "Triton is not installed")  # nor interprets
    Recording.made = Recording.replays = 0
    return Recording


def stream(model: Any, config: CacheConfig, engine: Any, ids: Tensor) -> list[Tensor]:
    with attach(model, config, engine=engine) as cache:
        parts = (ids[:, :40], *ids[:, 40:].split(1, 1))
        return [model(part, past_key_values=cache).logits for part in parts]


def check_replays(model: Any, config: CacheConfig, ids: Tensor, rounding: float = 0.0) -> None:
    ours, theirs = (stream(model, config, engine, ids) for engine in ("auto", "eager"))
    for a, b in zip(ours, theirs, strict=True):
        assert relative_error(a, b) <= rounding
    assert Recording.made == 1
    assert Recording.replays > ids.shape[1] - 60


@pytest.mark.every(2)
@pytest.mark.parametrize(("policy", "positions"), thinned(
    product(["h2o", "h2o-paper", "tova", "sink", "recent", "random"], ["gap", "absolute"]),
    lambda policy, positions: positions == ("absolute" if policy in ("h2o", "sink") else "gap"),
))  # fmt: skip
def test_policies_and_rows(recorded: type[Recording], policy: str, positions: Any) -> None:
    check_replays(make_llama(groups=2), CacheConfig(policy, window=24, positions=positions), tokens(72, rows=3))


@pytest.mark.parametrize("bits", with_exhaustive([4], [8, 6, 2]))
def test_few_bits(monkeypatch: pytest.MonkeyPatch, recorded: type[Recording], bits: int) -> None:
    """On a GPU all keys are encoded again in each step, whether their grid is a wider one or not."""
    model, config, ids = make_llama(groups=2), CacheConfig(window=24, kv_bits=bits), tokens(72, rows=2)
    theirs = stream(model, config, "eager", ids)
    monkeypatch.setattr(QuantizedStore, "_on_gpu", True)
    assert all(map(torch.equal, stream(model, config, "auto", ids), theirs))
    assert recorded.made == 1
    assert recorded.replays > 12


@pytest.mark.parametrize("name", with_exhaustive(["Gemma 3"], ["Qwen 3", "GLM"]))
def test_families(recorded: type[Recording], name: str) -> None:
    """Sliding layers, norms, another order of dimensions."""
    model = next(family for family in FAMILIES if family.name == name).make()
    check_replays(model, CacheConfig(window=24, span=18, chunk=16), tokens(80))


@pytest.mark.parametrize("name", with_exhaustive(
    ["Qwen 3 MoE", "LFM2", "Granite 4"],
    ["GLM-4 MoE", "gpt-oss", "LFM2 MoE", "Falcon-H1", "Qwen 3.5", "Qwen3-Next", "Bamba", "Nemotron-H", "Jamba",
     "MiMo V2", "OLMo hybrid", "Kimi Linear"],
))  # fmt: skip
def test_experts_and_recurrent_layers(recorded: type[Recording], name: str) -> None:
    model = next(family for family in FAMILIES if family.name == name).make()
    check_replays(model, CacheConfig(window=24, span=18, chunk=16), tokens(80), rounding=1e-5)


def run(model: Any, cache: Any, ids: Tensor) -> list[Tensor]:
    return [model(part, past_key_values=cache).logits for part in ids.split(1, 1)]


def test_what_changes_the_cache_is_captured_again(recorded: type[Recording]) -> None:
    model, results = make_llama(groups=2), []
    for engine in ("auto", "eager"):
        with attach(model, CacheConfig(window=24), engine=engine) as cache:
            logits = [model(tokens(40, 2), past_key_values=cache).logits[:, -1:]]

            logits += run(model, cache, tokens(20, 2, 1))
            start = cache.seen_tokens
            cache.pin(start - 4, start - 2)
            logits += run(model, cache, tokens(20, 2, 2))
            cache.reorder_cache(torch.tensor([1, 1, 0]))
            logits += run(model, cache, tokens(20, 3, 3))
            state = cache.state_dict()
            run(model, cache, tokens(5, 3, 4))
            cache.load_state_dict(state)
            logits += run(model, cache, tokens(20, 3, 4))
            model(tokens(30, 3, 5), past_key_values=cache)
            logits += run(model, cache, tokens(20, 3, 6))
            results.append(logits)
    for a, b in zip(*results, strict=True):
        assert a.equal(b)
    assert 4 <= recorded.made <= 6


def test_warm_up_and_growing_windows_are_eager(recorded: type[Recording]) -> None:
    model = make_llama(groups=2)
    with attach(model, CacheConfig(window=24)) as cache:
        model(tokens(10), past_key_values=cache)
        assert cache.engine_note.startswith("captured as a CUDA graph; attention is eager: ")
        while not cache.steady:
            model(tokens(1), past_key_values=cache)
        assert not recorded.made
        for _ in range(WARM_UP):
            model(tokens(1), past_key_values=cache)
        assert not recorded.made
        for _ in range(2):
            model(tokens(1), past_key_values=cache)
        assert recorded.made == 1


def test_a_step_that_cannot_be_captured_is_eager(monkeypatch: pytest.MonkeyPatch, recorded: type[Recording]) -> None:
    model, config = make_llama(groups=2), CacheConfig(window=24)
    theirs = stream(model, config, "eager", tokens(80))
    layer = model.model.layers[0]
    forward = layer.mlp.forward
    monkeypatch.setattr(layer.mlp, "forward", lambda x: forward(x) * (1.0 if x.sum().item() < 1e9 else 2.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = stream(model, config, "auto", tokens(80))
    assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))
    assert not recorded.made
    assert sum("cannot be captured" in str(warning.message) for warning in caught) == 1


def test_inputs_of_inference_mode(recorded: type[Recording]) -> None:
    """What is captured within is replayed without."""
    model = make_llama(groups=2)
    with attach(model, CacheConfig(window=24)) as cache:
        with torch.inference_mode():
            run(model, cache, tokens(30 + WARM_UP))
        assert recorded.made == 1
        with torch.no_grad():
            run(model, cache, tokens(2))
    assert recorded.replays


def test_weights_on_several_devices(monkeypatch: pytest.MonkeyPatch, recorded: type[Recording]) -> None:
    """A graph would hold kernels of one of them, and memory of the others would be free for other tensors."""
    monkeypatch.setattr("h2o_stream.attachment.gpu_steps.input_device", lambda model: torch.device("cuda"))
    with attach(make_llama(), CacheConfig(window=24)) as cache:
        assert cache.engine_note.startswith("eager: weights are on several devices")


def test_a_capture_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is as before, and the reason is what failed, not that the capture could not be ended then."""
    current = ["main"]

    @contextmanager
    def stream(new: str) -> Iterator[None]:
        before, current[0] = current[0], new
        try:
            yield
        finally:
            current[0] = before

    class Capture:
        def __init__(self, graph: Any, stream: str, **settings: Any) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            current[0] = self.stream

        def __exit__(self, *_: object) -> None:
            raise RuntimeError("the capture was invalidated")

    cuda = {"CUDAGraph": object, "Stream": lambda: "side", "current_stream": lambda: current[0], "graph": Capture}
    for name, stand_in in {**cuda, "stream": stream}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    step = Mock(side_effect=RuntimeError("a sync"))
    with attach(make_llama(), CacheConfig(window=24)) as cache:
        steps = GraphSteps(step, cache)
        with pytest.warns(UserWarning, match="a sync"):
            assert not steps._capture({name: tokens(1) for name in ("input_ids", "position_ids")})
    assert current == ["main"]


@pytest.mark.parametrize(("number", "settings", "device", "words"), [
    (0, {}, "cpu", "not on a CUDA device"), (0, {}, "cuda", ""), (0, {"device": "cpu"}, "cuda", "host memory"),
    (0, {"kv_bits": 8}, "cuda", ""), (0, {"policy": "expected-attention"}, "cuda", "a state of each head"),
    (22, {}, "cuda", ""),
])  # fmt: skip
def test_what_is_not_captured(number: int, settings: dict[str, Any], device: str, words: str) -> None:
    with attach(FAMILIES[number].make(), CacheConfig(**{"window": 24, "chunk": 8, **settings})) as cache:
        reason = graphs.why_not(cache, torch.device(device))
        assert words in reason
        assert bool(words) == bool(reason)
