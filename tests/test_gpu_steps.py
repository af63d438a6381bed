"""Fused layers under Triton's interpreter, against the model's own. `tests/test_gpu.py` runs them."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

from h2o_stream import CacheConfig, attach
from h2o_stream.attachment.describe import describe
from h2o_stream.cache.recurrent import states_of
from h2o_stream.config import ModelConfig
from h2o_stream.gpu import available, graphs
from h2o_stream.gpu.graphs import WARM_UP, GraphSteps
from h2o_stream.loading import transformers_model
from h2o_stream.loading.hf_weights import HfWeights
from h2o_stream.loading.transformers_model import load
from h2o_stream.native.abi import Activation, MatrixKind, NormKind
from h2o_stream.native.gguf_types import TensorType
from h2o_stream.native.matrix import Norm
from h2o_stream.native.torch_modules import DTYPES
from tests.families import FAMILIES
from tests.family_models import smaller
from tests.fixtures import ids, make_llama
from tests.fixtures import ids as tokens
from tests.gguf_files import write_model
from tests.test_gpu_graphs import Recording
from tests.test_gpu_kernels import products_of_bfloat16  # noqa: F401
from tests.tolerance import relative_error

pytestmark = pytest.mark.skipif(os.environ.get(available.INTERPRET) != "1", reason="Triton does not interpret kernels")

HYBRIDS = ["LFM2", "LFM3", "LFM2 MoE", "Qwen 3.5", "Qwen3-Next", "Falcon-H1", "Bamba", "Granite 4", "Nemotron-H",
           "OLMo hybrid"]

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
    *HYBRIDS,
]


def family(name: str) -> Any:
    return next(family for family in FAMILIES if family.name == name).make()


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


@pytest.mark.parametrize("name", FUSED)
def test_families(name: str) -> None:
    model = family(name)
    check(model, CacheConfig(window=24, chunk=16), 1)


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
    ("Qwen 3.5", 1, 16), ("Bamba", 2, 16),
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


TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


def random_blocks(name: str, rows: int, columns: int) -> numpy.ndarray:
    size, count = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    random = numpy.random.default_rng(0)
    blocks = random.integers(0, 256, (rows, columns // size, count), numpy.uint8)
    halves = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}.get(name, (0, 2))
    for at in halves:  # scales of a usual size
        blocks[:, :, at : at + 2] = random.normal(0, 0.05, (rows, columns // size, 1)).astype(numpy.float16).view(
            numpy.uint8)  # fmt: skip
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("name", TYPES)
def test_as_the_package_gguf(name: str) -> None:
    from h2o_stream.gpu.packed import BlockEmbedding, BlockLinear, repacked

    kind, columns = TensorType[name], 768
    blocks = random_blocks(name, 6, columns)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind)).copy())
    packed = repacked(blocks, kind, torch.device("cpu"))
    assert packed is not None
    assert packed.numel() == blocks.size
    linear = BlockLinear(packed, kind, 6, columns, torch.randn(6))
    assert torch.allclose(linear.matrix().unpacked(torch.float32), expected, rtol=1e-6, atol=1e-7)
    x = torch.randn(3, columns)
    few = linear(x.half()[None])
    wanted = torch.nn.functional.linear(x.half().double(), expected.double(), linear.bias.double())[None]
    assert torch.allclose(few.double(), wanted, rtol=2e-3, atol=2e-3 * float(wanted.abs().max()))
    for inputs in (x, x[:1]):
        wanted = torch.nn.functional.linear(inputs.double(), expected.double(), linear.bias.double()).float()
        assert torch.allclose(linear(inputs), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    embedding = BlockEmbedding(packed, kind, 6, columns, torch.float32)
    assert torch.allclose(embedding(torch.tensor([[5, 0]])), expected[None, [5, 0]], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "columns"), [("Q4_0", 2048), ("Q8_0", 1056), ("Q4_K", 3072), ("Q5_K", 768), ("Q6_K", 3072)]
)
def test_products_with_all_around_them(monkeypatch: pytest.MonkeyPatch, name: str, columns: int) -> None:
    """Gates under a norm, and a residual, in one to three groups for a thread, against float64. Three matrices below
    each other are one launch.
    """
    from h2o_stream.gpu.matrices import gemv
    from h2o_stream.gpu.packed import block_matrix, multiply_blocks, repacked

    kind, rows = TensorType[name], 6
    packed = repacked(random_blocks(name, rows, columns), kind, torch.device("cpu"))
    assert packed is not None
    weight, bias = torch.rand(columns) + 0.5, torch.randn(rows)
    matrix, norm = block_matrix(packed, bias, kind, rows, columns), Norm(NormKind.RMS, weight, None, 1e-6)
    x, added = torch.randn(1, columns) + 0.3, torch.randn(1, rows)
    normed = torch.nn.functional.rms_norm(x.double(), (columns,), weight.double(), 1e-6)
    product = normed @ matrix.unpacked(torch.float32).double().T + bias
    gated = gemv([matrix, matrix], x, norm, gated=True, activation=int(Activation.RELU))
    assert relative_error(gated.double(), product.relu() * product) < 1e-4
    other = repacked(random_blocks(name, rows, columns)[3::-1], kind, torch.device("cpu"))
    below = [matrix, block_matrix(other, bias[:4] + 1, kind, 4, columns), matrix]
    alone, launches = torch.cat([gemv([each], x, norm) for each in below], 1), list[None]()
    with monkeypatch.context() as patch:
        patch.setattr("h2o_stream.gpu.matrices.multiply_blocks", lambda *args: launches.append(multiply_blocks(*args)))
        assert torch.equal(gemv(below, x, norm), alone)
    assert len(launches) == 1
    summed = gemv([replace(matrix, scale=0.5)], x, norm, added=added, add_scale=2.0)
    assert relative_error(summed.double(), product + added) < 5e-5


@pytest.mark.parametrize("name", ["Q8_0", "Q5_K"])
def test_five_rows_and_matrices_below_each_other(name: str) -> None:
    from h2o_stream.gpu.packed import block_matrix, products_of_rows, repacked

    kind, columns, x, sizes = TensorType[name], 768, torch.randn(5, 768).half(), (32, 64, 6)
    blocks = random_blocks(name, 64, columns)
    packed = [repacked(blocks[64 - size :], kind, torch.device("cpu")) for size in sizes]
    below = [block_matrix(x, torch.randn(size), kind, size, columns) for x, size in zip(packed, sizes, strict=True)]
    [joined] = products_of_rows(below, x)
    assert torch.equal(joined, torch.cat([products_of_rows([each], x)[0] for each in below], 1))


GEMMA = smaller(
    "gemma3", "Gemma3", "Gemma3Text", num_hidden_layers=1, sliding_window=24, layer_types=["sliding_attention"]
)


class Materialized(TorchDispatchMode):
    """The largest number of elements of a tensor of floating-point numbers that is made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point() and not out.is_meta:
            self.largest = max(self.largest, out.numel())
        return out


def load_to_gpu(monkeypatch: pytest.MonkeyPatch, config: ModelConfig) -> Any:
    """The model of a file as it is loaded to a GPU."""
    monkeypatch.setattr(transformers_model._Loader, "_model", transformers_model._Loader._load_to_devices)
    return load(config).model


@pytest.mark.parametrize(("name", "permuted"), [("llama", False), ("llama", True), ("gemma3", False)])
def test_a_file_whose_blocks_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, permuted: bool) -> None:
    """Also a scaled embedding with a tied head. No matrix is ever unpacked."""
    from h2o_stream.gpu import layers

    monkeypatch.setattr("h2o_stream.gpu.packed._REPACKED", 5)
    monkeypatch.setattr("h2o_stream.loading.gpu_blocks._COMPARED", 3)
    model = make_llama(heads=2, groups=2, layers=1) if name == "llama" else GEMMA.make()
    path, read, values = tmp_path / "model.gguf", list[str](), HfWeights.values
    kind = gguf.GGMLQuantizationType.Q4_0
    write_model(path, model, name, quantize=kind, permuted=permuted)
    config = ModelConfig(str(path), device="cpu", dtype="float32")
    with Materialized() as made, monkeypatch.context() as patch:
        patch.setattr(HfWeights, "values", lambda self, name: read.append(name) or values(self, name))
        kept = load_to_gpu(monkeypatch, config)
    assert made.largest < min(weight.numel() for weight in model.parameters() if weight.ndim == 2)
    assert read
    assert all(name.endswith("norm.weight") for name in read)
    dense = load_to_gpu(monkeypatch, replace(config, quantize="none"))
    linear = [module for module in dense.modules() if type(module) is torch.nn.Linear]
    assert len([module for module in kept.modules() if hasattr(module, "blocks")]) == len(linear) + 1
    assert not layers.why_not(describe(kept))
    for count, error in ((9, 0), (1, 3e-4)):  # of few tokens each of nine products loses up to 3e-5
        assert relative_error(kept(ids(count)).logits, dense(ids(count)).logits) <= error


def test_blocks_that_a_device_reads_in_another_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are unpacked, as without kernels."""
    path, model = tmp_path / "model.gguf", make_llama(heads=2, groups=2, layers=1)
    write_model(path, model, "llama", quantize=gguf.GGMLQuantizationType.Q8_0)
    monkeypatch.setattr("h2o_stream.gpu.packed.repack", lambda blocks, kind, columns, into: into.codes.zero_())
    kept = load_to_gpu(monkeypatch, ModelConfig(str(path), device="cpu", dtype="float32"))
    assert not any(hasattr(module, "blocks") for module in kept.modules())
