"""Layers and embeddings with packed weights, and a model of them."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from h2o_stream import CacheConfig, H2OStreamError, attach
from h2o_stream.models.packed_layers import PackedEmbedding, PackedLinear
from h2o_stream.native import library
from h2o_stream.native.abi import MatrixKind
from tests.fixtures import make_llama
from tests.in_turn import in_turn
from tests.packed_tiles import KINDS, numbers, random_tiles


@pytest.fixture(autouse=True)
def every_build(native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all tests with every library."""
    monkeypatch.setattr(library, "loaded", lambda: native)


def linear(kind: MatrixKind, rows: int, columns: int, bias: torch.Tensor | None = None) -> PackedLinear:
    parameter = None if bias is None else nn.Parameter(bias)
    return PackedLinear(kind, columns, rows, parameter, random_tiles(kind, rows, columns))


@in_turn("dtype", [torch.float32, torch.bfloat16])
@in_turn("kind", KINDS)
@in_turn("bias", [False, True])
def test_a_layer(kind: MatrixKind, bias: bool, dtype: torch.dtype) -> None:
    """With a few vectors and with a prompt. Rounding them to 14 bits does not show."""
    torch.manual_seed(0)
    layer = linear(kind, 46, 512, torch.randn(46).to(dtype) if bias else None)
    weights = numbers(layer.tiles, kind, 46, 512)
    for rows in (1, 7, 80):
        x = torch.randn(2, rows, 512).to(dtype)
        expected = nn.functional.linear(x.double(), weights, None if layer.bias is None else layer.bias.double())
        y = layer(x)
        assert y.shape == expected.shape
        assert y.dtype == dtype
        assert (y - expected).norm() < (2e-4 if dtype == torch.float32 else 4e-3) * expected.norm()


@in_turn("rows", [3, 40])
def test_gradients_are_refused(rows: int) -> None:
    """A forward is served with gradients on, as torch has them by default; only `backward` is not."""
    layer, x = linear(MatrixKind.INT8, 32, 64), torch.randn(rows, 64)
    with torch.enable_grad():
        y = layer(x.requires_grad_())
        assert y.equal(layer(x.detach()))
        with pytest.raises(H2OStreamError, match="packed weights have no gradients"):
            y.sum().backward()


@in_turn("dtype", [torch.float32, torch.bfloat16])
@in_turn("kind", KINDS)
def test_an_embedding(kind: MatrixKind, dtype: torch.dtype) -> None:
    tiles = random_tiles(kind, 50, 256)
    embedding = PackedEmbedding(kind, 50, 256, dtype, tiles=tiles)
    ids = torch.tensor([[3, 49, 0], [17, 17, 16]])
    assert embedding(ids).equal(numbers(tiles, kind, 50, 256).to(dtype)[ids])
    with pytest.raises(IndexError, match="token 50 is not one of 50"):
        embedding(torch.tensor([50]))


def packed_model(kind: MatrixKind) -> PreTrainedModel:
    """A model of this kind, with one matrix and the output layer of another."""
    torch.manual_seed(0)
    model = make_llama(heads=4, groups=2, size=64)
    for number, parent in enumerate(list(model.modules())):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                rows, columns = child.weight.shape
                other = MatrixKind.INT8 if name in ("v_proj", "lm_head") or columns % 256 else kind
                tiles = random_tiles(other, rows, columns, number)
                layer = PackedLinear(other, columns, rows, None, tiles)
                setattr(parent, name, layer)
    rows, columns = model.get_input_embeddings().weight.shape
    model.set_input_embeddings(
        PackedEmbedding(kind, rows, columns, torch.float32, tiles=random_tiles(kind, rows, columns))
    )
    return model.eval()


@pytest.mark.every(3)
@pytest.mark.parametrize(("kind", "rows"), [(kind, 1 + 2 * (number % 2)) for number, kind in enumerate(KINDS)])
def test_native_steps(kind: MatrixKind, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares every step with the layers' own forward."""
    monkeypatch.setenv(library.CHECK_VARIABLE, "1")
    model, ids = packed_model(kind), torch.randint(3, 64, (rows, 14))
    with torch.no_grad(), attach(model, CacheConfig("h2o", 32)) as cache:
        assert cache.engine_note.startswith("native"), cache.engine_note
        model(ids[:, :10], past_key_values=cache)
        for part in ids[:, 10:].split(1, 1):
            assert model(part, past_key_values=cache).logits.isfinite().all()


@in_turn("kind", KINDS)
def test_layers_are_thread_safe(kind: MatrixKind) -> None:
    """The layer keeps no intermediate results."""
    layer = linear(kind, 64, 512)
    inputs = [torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows)) for rows in (1, 2, 5, 40)]
    expected = [layer(x) for x in inputs]
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(lambda _: [layer(x) for x in inputs], range(12)):
            assert all(map(torch.equal, found, expected))
