"""Products with the blocks of GGUF files under Triton's interpreter. `tests/test_gpu.py` runs them."""

import os
from dataclasses import replace
from pathlib import Path

import gguf
import numpy
import pytest
import torch

from h2o_stream.attachment.describe import describe
from h2o_stream.config import ModelConfig
from h2o_stream.gpu import available
from h2o_stream.loading import transformers_model
from h2o_stream.loading.transformers_model import load
from h2o_stream.native.gguf_types import TensorType
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
    from h2o_stream.gpu.packed import BlockEmbedding, BlockLinear, unpack

    kind, columns = TensorType[name], 768
    blocks = random_blocks(name, 6, columns)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind)).copy())
    linear = BlockLinear(torch.from_numpy(blocks), kind, columns, torch.randn(6))
    assert torch.allclose(unpack(linear.matrix(), torch.float32), expected, rtol=1e-6, atol=1e-7)
    x = torch.randn(3, columns)
    few = linear(x.half()[None])
    wanted = torch.nn.functional.linear(x.half().double(), expected.double(), linear.bias.double())[None]
    assert torch.allclose(few.double(), wanted, rtol=2e-3, atol=2e-3 * float(wanted.abs().max()))
    for inputs in (x, x[:1]):
        wanted = torch.nn.functional.linear(inputs.double(), expected.double(), linear.bias.double()).float()
        assert torch.allclose(linear(inputs), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    embedding = BlockEmbedding(torch.from_numpy(blocks), kind, columns, torch.float32)
    assert torch.allclose(embedding(torch.tensor([[5, 0]])), expected[None, [5, 0]], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("permuted", [False, True])
def test_a_file_whose_blocks_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, permuted: bool) -> None:
    """As on a GPU: unpacked first, then every matrix is replaced that the file has as it is needed."""
    from h2o_stream.gpu import layers

    path = tmp_path / "model.gguf"
    kind = gguf.GGMLQuantizationType.Q4_0
    write_model(path, make_llama(heads=2, groups=2, layers=1), "llama", quantize=kind, permuted=permuted)
    monkeypatch.setattr(transformers_model._Loader, "_model", transformers_model._Loader._load_to_devices)
    config = ModelConfig(str(path), device="cpu", dtype="float32")
    kept, dense = load(config).model, load(replace(config, quantize="none")).model
    matrices = [module for module in kept.modules() if hasattr(module, "blocks")]
    assert len(matrices) == 7 + 2
    assert not layers.why_not(describe(kept))
    for count in (3, 1):  # products of several tokens, and of one
        assert relative_error(kept(ids(count)).logits, dense(ids(count)).logits) < 1e-4
