"""Matrices in blocks of GGUF files, under Triton's interpreter. `tests/test_gpu.py` runs them."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from h2o_stream.attachment.describe import describe
from h2o_stream.config import ModelConfig
from h2o_stream.gpu import available
from h2o_stream.loading import transformers_model
from h2o_stream.loading.hf_weights import HfWeights
from h2o_stream.loading.transformers_model import load
from h2o_stream.native.abi import Activation, MatrixKind, NormKind
from h2o_stream.native.description import Mlp
from h2o_stream.native.gguf_types import TensorType
from h2o_stream.native.matrix import NO_NORM, Matrix, Norm
from tests.family_models import smaller
from tests.fixtures import ids, make_llama
from tests.gguf_files import write_model
from tests.tolerance import relative_error

pytestmark = pytest.mark.skipif(os.environ.get(available.INTERPRET) != "1", reason="Triton does not interpret kernels")

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


@pytest.mark.parametrize("name", ["", "Q8_0"])
def test_gates_of_five_rows(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Those in blocks are one product with what they are for."""
    from h2o_stream.gpu import matrices, mlps
    from h2o_stream.gpu.packed import block_matrix, products_of_rows, repacked

    def matrix(rows: int, columns: int) -> Matrix:
        if not name:
            return Matrix(torch.randn(rows, columns) / 16, torch.randn(rows), rows, columns, MatrixKind.FLOAT32)
        packed = repacked(random_blocks(name, rows, columns), TensorType[name], torch.device("cpu"))
        return block_matrix(packed, torch.randn(rows), TensorType[name], rows, columns)

    launches, x = list[int](), torch.randn(5, 256).half()
    monkeypatch.setattr(
        matrices, "products_of_rows", lambda of, x: [launches.append(len(of)), *products_of_rows(of, x)][1:]
    )
    norm = Norm(NormKind.RMS, torch.rand(32), None, 1e-6)
    mlp = Mlp(matrix(32, 256), matrix(32, 256), matrix(256, 32), Activation.SILU, inner_norm=norm)
    gate, up = (
        x.double() @ (part.unpacked(torch.float32) if name else part.weights).double().T + part.bias
        for part in (mlp.gate, mlp.up)
    )
    wanted = torch.nn.functional.rms_norm(torch.nn.functional.silu(gate) * up, (32,), norm.weight.double(), 1e-6)
    assert relative_error(mlps.inner(mlp, x, NO_NORM).double(), wanted) < 3e-3
    assert launches == [2] * bool(name)


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
