"""Packed tiles from floats and from GGUF blocks, for every instruction set.

The tests read tiles with numpy, as specified in `src/abi.h`, and blocks with the `gguf` package.
"""

import ctypes

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from h2o_stream.errors import ConfigError
from h2o_stream.native import library
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.packing import BLOCK, GGUF_KINDS, GROUP, ROWS, gather, pack, repack, tiles_shape
from tests.in_turn import in_turn
from tests.packed_tiles import numbers, tile_dtype

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

SMALLEST = float(torch.finfo(torch.float16).smallest_normal)
"""Scale of 8 bits."""

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = [MatrixKind.INT8, MatrixKind.INT4]


@pytest.fixture(autouse=True)
def chosen(native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs with each library."""
    monkeypatch.setattr(library, "loaded", lambda: native)


def unpacked(tiles: Tensor, kind: MatrixKind, rows: int, columns: int) -> Floats:
    """The matrix [rows, columns]. Rows beyond the last must be zero, as must padding."""
    assert tiles.shape == tiles_shape(kind, rows, columns)
    blocks = tiles.numpy().view(tile_dtype(kind, columns))
    assert not any(blocks[name]["zeros"].any() for name in blocks.dtype.names)
    matrix = numbers(tiles, kind, len(tiles) * ROWS, columns).numpy()
    assert not matrix[rows:].any()
    return matrix[:rows].astype(np.float32)


def random_blocks(name: str, rows: int, columns: int) -> Bytes:
    """Blocks of random bytes whose 16-bit scales are finite."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    blocks = np.random.default_rng(0).integers(0, 256, (rows, columns // block, size), np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = 104 + blocks[..., 0] % 40  # exponents of numbers of 16 bits
        return blocks.reshape(rows, -1)
    halves = {"Q6_K": [208], "Q3_K": [108], "Q2_K": [80, 82]}.get(name)
    for place in halves or ([0, 2] if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [0]):
        blocks[..., place + 1] &= 0xBF  # less than 2
    return blocks.reshape(rows, -1)


def repacked(name: str, blocks: Bytes, rows: int, columns: int, order: Tensor | None = None) -> Floats:
    kind = GGUF_KINDS[name]
    tiles = repack(torch.from_numpy(blocks), GGMLQuantizationType[name], kind, rows, columns, order)
    return unpacked(tiles, kind, rows, columns)


def assert_as_in_file(name: str, actual: Floats, blocks: Bytes) -> None:
    """Bit by bit, except where scales are products."""
    error = 1e-6 if name.endswith(("_K", "_XS")) else 0
    np.testing.assert_allclose(actual, dequantize(blocks, GGMLQuantizationType[name]), rtol=error, atol=error)


def column_counts(name: str) -> list[int]:
    return [256, 768] if name.endswith(("_K", "_XS")) else [32, 64, 96, 256, 288, 576]


class TestRepack:
    @in_turn("name", GGUF_KINDS)
    @in_turn("rows", [1, 16, 37])
    def test_numbers_are_those_of_the_file(self, name: str, rows: int) -> None:
        for columns in column_counts(name):
            blocks = random_blocks(name, rows, columns)
            assert_as_in_file(name, repacked(name, blocks, rows, columns), blocks)

    @in_turn("name", GGUF_KINDS)
    def test_row_order(self, name: str) -> None:
        rows, columns = 35, column_counts(name)[-1]
        blocks = random_blocks(name, rows, columns)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
        assert_as_in_file(name, repacked(name, blocks, rows, columns, order), blocks[order.numpy()])

    @in_turn("name", GGUF_KINDS)
    def test_the_library_reads_them(self, name: str) -> None:
        self.check_reading(name)

    def check_reading(self, name: str) -> None:
        kind = GGUF_KINDS[name]
        blocks = torch.from_numpy(random_blocks(name, 37, 768))
        tiles = repack(blocks, GGMLQuantizationType[name], kind, 37, 768)
        actual, expected = gather(tiles, kind, 37, 768, torch.arange(37), "float32"), unpacked(tiles, kind, 37, 768)
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-5, atol=1e-6)

    @in_turn("name", GGUF_KINDS)
    def test_any_bytes(self, name: str) -> None:
        """Infinite and NaN scales leave the other tiles untouched."""
        rows, columns = 32, column_counts(name)[-1]
        kind, number = GGUF_KINDS[name], GGMLQuantizationType[name]
        random = np.random.default_rng(1)
        for fill in (None, 0, 0xFF, 0x7C, 0x7F):
            blocks = random_blocks(name, rows, columns)
            bad = blocks[:ROWS]
            bad[:] = random.integers(0, 256, bad.shape, np.uint8) if fill is None else fill
            tiles = repack(torch.from_numpy(blocks), number, kind, rows, columns)
            assert_as_in_file(name, unpacked(tiles[1:], kind, ROWS, columns), blocks[ROWS:])

    @in_turn("name", ["Q4_1", "Q6_K", "IQ4_XS"])
    def test_on_any_processor(self, name: str, portable: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(library, "loaded", lambda: portable)
        self.check_reading(name)

    def test_what_is_not_known_is_refused(self) -> None:
        blocks = torch.zeros(4096, dtype=torch.uint8)
        for number, kind, columns in [
            (GGMLQuantizationType.IQ3_S, MatrixKind.INT8, 256),
            (GGMLQuantizationType.Q4_K, MatrixKind.INT4, 256),
            (GGMLQuantizationType.Q8_0, MatrixKind.INT8, 48),
            (GGMLQuantizationType.Q4_K, MatrixKind.Q4_K, 128),
            (-1, MatrixKind.INT8, 32),
        ]:
            out = torch.zeros(tiles_shape(kind, 1, BLOCK), dtype=torch.uint8)
            with pytest.raises(ConfigError, match=str(int(number))):
                repack(blocks, number, kind, 1, columns, out=out)
            assert not out.any()


def packed(weights: Tensor, kind: MatrixKind) -> Tensor:
    """The weights, packed and unpacked, float32."""
    return torch.from_numpy(unpacked(pack(weights, kind), kind, *weights.shape))


def int8_reference(weights: Tensor) -> Tensor:
    groups = weights.float().unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half().clamp_min(SMALLEST)
    return ((groups / scale.float()).round().clamp(-127, 127) * scale.float()).flatten(1)


def int4_errors(weights: Tensor) -> Tensor:
    """Squared errors [rows, n, 2] of the groups on the grids of Q4_1 and Q4_0."""
    groups = weights.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    end = torch.where(high > -low, high, low)
    zero_scale = (end / -8).half().float()
    errors = []
    for scale, offset in (((high - low) / 15, low), (zero_scale, -8 * zero_scale)):
        scale, offset = scale.half().float(), offset.half().float()
        codes = ((groups - offset) / torch.where(scale == 0, 1, scale)).round().clamp(0, 15)
        errors.append((codes * scale + offset - groups).square().sum(-1))
    return torch.stack(errors, -1)


class TestPack:
    @in_turn("dtype", DTYPES)
    @in_turn("rows", [1, 16, 37])
    def test_int8(self, rows: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        for columns in (32, 96, 256, 288, 576):
            weights = (torch.randn(rows, columns) * torch.rand(rows, 1)).to(dtype)
            torch.testing.assert_close(packed(weights, MatrixKind.INT8), int8_reference(weights), rtol=0, atol=0)

    @in_turn("dtype", DTYPES)
    @in_turn("rows", [1, 16, 37])
    def test_int4(self, rows: int, dtype: torch.dtype) -> None:
        """Groups use the better of two grids."""
        torch.manual_seed(0)
        for columns in (32, 96, 256, 288, 576):
            weights = (torch.randn(rows, columns) + torch.rand(rows, 1)).to(dtype)
            lost = (packed(weights, MatrixKind.INT4) - weights.float()).unflatten(1, (-1, GROUP)).square().sum(-1)
            torch.testing.assert_close(lost, int4_errors(weights).amin(-1), rtol=1e-4, atol=1e-9)

    @in_turn("name", ["Q8_0", "Q4_0", "Q4_1"])
    def test_numbers_of_gguf_files_are_not_rounded_again(self, name: str) -> None:
        torch.manual_seed(0)
        scale, offset = (torch.rand(37, 3, 1) * 0.01 + 1e-4).half().float(), -torch.rand(37, 3, 1).half().float()
        if name == "Q8_0":
            codes = torch.randint(-127, 128, (37, 3, 32))
            codes[..., 7], offset = 127, torch.zeros_like(offset)
        else:
            codes = torch.randint(0, 16, (37, 3, 32))
            codes[..., 20] = 0
            if name == "Q4_0":
                offset = -8 * scale
            else:
                codes[..., 3] = 15
        weights = (codes * scale + offset).flatten(1)
        kind = MatrixKind.INT8 if name == "Q8_0" else MatrixKind.INT4
        torch.testing.assert_close(packed(weights, kind), weights, rtol=0, atol=0)

    @in_turn("kind", KINDS)
    def test_constant_groups(self, kind: MatrixKind) -> None:
        for number in (0.0, 1e-7, 0.7, -3.0):
            weights = torch.full((4, 64), number)
            torch.testing.assert_close(packed(weights, kind), weights, rtol=2e-3, atol=1e-7)

    @in_turn("dtype", DTYPES)
    @in_turn("kind", KINDS)
    def test_any_numbers(self, kind: MatrixKind, dtype: torch.dtype) -> None:
        """Infinities, NaNs and numbers beyond the fp16 range give finite grids and leave other rows alone."""
        random = np.random.default_rng(0)
        size = torch.tensor([], dtype=dtype).element_size()
        weights = torch.from_numpy(random.integers(0, 256, (16, 96 * size), np.uint8)).view(dtype)
        for row, number in enumerate((float("nan"), float("inf"), -float("inf"), torch.finfo(dtype).max)):
            weights[row, row:] = number
        torch.manual_seed(0)
        good = torch.randn(16, 96).to(dtype)
        tiles = pack(torch.cat([weights, good]), kind)
        assert tiles[1].equal(pack(good, kind)[0])
        if dtype != torch.float16:
            assert np.isfinite(unpacked(tiles, kind, 32, 96)).all()

    @in_turn("kind", KINDS)
    def test_threads_agree(self, kind: MatrixKind, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        weights = torch.randn(100, 64)
        results = []
        for threads in (1, 2, 5):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            results.append(pack(weights, kind))
        assert all(result.equal(results[0]) for result in results)
