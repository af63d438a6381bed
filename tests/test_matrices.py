"""Matrices times vectors, for every kind and instruction set, against float64."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from h2o_stream.native.abi import Matrix, MatrixKind
from h2o_stream.native.packing import GROUP, from_tiles, kind_of, tile_bytes, to_tiles
from tests.native_builds import native  # noqa: F401

GUARD = 123.5
"""What lies behind an output and must not be touched."""


def packed(rows: int, columns: int, bits: int) -> Tensor:
    """Tiles of random codes and scales."""
    groups = columns // GROUP
    low, high, dtype = (-127, 128, torch.int8) if bits == 8 else (0, 256, torch.uint8)
    codes = torch.randint(low, high, (rows, groups, GROUP * bits // 8), dtype=dtype)
    scales = (torch.rand(rows, 1, groups) + 0.1) * 0.01
    offsets = -7.5 * scales + torch.randn(rows, 1, groups) * 0.002
    return to_tiles(codes, torch.cat([scales, offsets][: 8 // bits], 1).half())


def vectors(count: int, columns: int) -> tuple[Tensor, Tensor]:
    """Random vectors, and in float64 the same as packed matrices see them; no number is half way between two codes."""
    groups = torch.randn(count, columns // GROUP, GROUP) * 10.0 ** torch.randint(-3, 4, (count, 1, 1))
    steps = groups.double().abs().amax(-1, keepdim=True) / 127
    groups[((groups / steps).frac().abs() - 0.5).abs() < 1e-3] = 0
    return groups.flatten(1), ((groups / steps).round() * steps).flatten(1)


def described(weights: Tensor, bias: Tensor | None, rows: int, columns: int, kind: int) -> Matrix:
    return Matrix(weights.data_ptr(), None if bias is None else bias.data_ptr(), rows, columns, kind)


def multiply(library: ctypes.CDLL, matrix: Matrix, x: Tensor, threads: int = 1) -> Tensor:
    out = torch.full((len(x) * matrix.rows + 1,), GUARD)
    library.h2o_multiply(
        ctypes.byref(matrix),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        *map(ctypes.c_int64, (len(x), threads)),
    )
    assert out[-1] == GUARD
    return out[:-1].view(len(x), matrix.rows)


def assert_near(y: Tensor, expected: Tensor, share: float) -> None:
    """No number is further off than a share of the rms of what is expected of its vector."""
    rms = expected.square().mean(1, keepdim=True).sqrt()
    assert ((y.double() - expected).abs() <= share * rms).all()


COUNTS = [1, 2, 3, 4, 5, 6, 7, 8, 16, 33]


@pytest.mark.parametrize("kind", [MatrixKind.FLOAT32, MatrixKind.BFLOAT16])
@pytest.mark.parametrize("columns", [1, 7, 16, 40, 576])
def test_dense(native: ctypes.CDLL, kind: int, columns: int) -> None:  # noqa: F811
    torch.manual_seed(columns)
    for rows in (*range(1, 10), 37):
        weights = torch.randn(rows, columns)
        if kind == MatrixKind.BFLOAT16:
            weights = weights.bfloat16()
        bias = torch.randn(rows) if rows % 2 else None
        matrix = described(weights, bias, rows, columns, kind)
        for count in COUNTS:
            x = torch.randn(count, columns)
            expected = x.double() @ weights.double().T + (0 if bias is None else bias.double())
            scale = x.double().square().mean(1, keepdim=True).sqrt() * columns**0.5
            assert ((multiply(native, matrix, x).double() - expected).abs() <= 1e-5 * scale + 1e-6).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("columns", [32, 96, 256, 576, 1536])
def test_packed(native: ctypes.CDLL, bits: int, columns: int) -> None:  # noqa: F811
    torch.manual_seed(columns)
    for rows in (*range(1, 10), 37):
        tiles = packed(rows, columns, bits)
        assert tiles.shape == (-(-rows // 4), tile_bytes(columns, bits)[2])
        weights = from_tiles(tiles, rows, columns, bits).double()
        bias = torch.randn(rows) if rows % 2 else None
        matrix = described(tiles, bias, rows, columns, kind_of(bits))
        for count in COUNTS:
            x, rounded = vectors(count, columns)
            expected = rounded @ weights.T
            norm = weights.square().mean().sqrt() * x.double().square().mean(1, keepdim=True).sqrt() * columns**0.5
            y = multiply(native, matrix, x).double() - (0 if bias is None else bias.double())
            assert ((y - expected).abs() <= 1e-5 * norm + (0 if bias is None else 1e-6)).all()


def kinds_and_weights(rows: int, columns: int) -> list[tuple[int, Tensor]]:
    weights = torch.randn(rows, columns)
    few_bits = [(kind_of(bits), packed(rows, columns, bits)) for bits in (8, 4)]
    return [(MatrixKind.FLOAT32, weights), (MatrixKind.BFLOAT16, weights.bfloat16()), *few_bits]


def test_results_do_not_depend_on_threads_or_other_vectors(native: ctypes.CDLL) -> None:  # noqa: F811
    torch.manual_seed(0)
    for kind, weights in kinds_and_weights(403, 576):
        matrix, x = described(weights, None, 403, 576, kind), torch.randn(13, 576)
        together = multiply(native, matrix, x)
        for threads in (2, 3):
            assert multiply(native, matrix, x, threads).equal(together)
        for vector in range(13):
            alone = multiply(native, matrix, x[vector : vector + 1])
            if kind in (MatrixKind.FLOAT32, MatrixKind.BFLOAT16):  # added up in another order
                assert_near(alone, together[vector : vector + 1].double(), 1e-5)
            else:
                assert alone.equal(together[vector : vector + 1])


def test_what_was_multiplied_before_is_of_no_account(native: ctypes.CDLL) -> None:  # noqa: F811
    """Space for vectors is used again: for shorter ones, after some that were not finite."""
    torch.manual_seed(0)
    for columns in (576, 96):
        for kind, weights in kinds_and_weights(8, columns):
            matrix, x = described(weights, None, 8, columns, kind), torch.randn(3, columns)
            before = multiply(native, matrix, x)
            wide = torch.zeros(8, 1536)
            multiply(native, described(wide, None, 8, 1536, MatrixKind.FLOAT32), torch.full((40, 1536), torch.nan))
            tiles = packed(8, 1536, 4)
            multiply(native, described(tiles, None, 8, 1536, kind_of(4)), torch.full((40, 1536), torch.nan))
            assert multiply(native, matrix, x).equal(before)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_shows(native: ctypes.CDLL, bits: int, value: float) -> None:  # noqa: F811
    tiles, x = packed(8, 96, bits), torch.randn(2, 96)
    x[1, 40] = value
    y = multiply(native, described(tiles, None, 8, 96, kind_of(bits)), x)
    assert y[0].isfinite().all()
    assert not y[1].isfinite().any()


@pytest.mark.parametrize("bits", [8, 4])
def test_extreme_vectors(native: ctypes.CDLL, bits: int) -> None:  # noqa: F811
    tiles = packed(8, 96, bits)
    matrix, weights = described(tiles, None, 8, 96, kind_of(bits)), from_tiles(tiles, 8, 96, bits).double()
    x = torch.stack([torch.zeros(96), torch.full((96,), 1e-41), torch.full((96,), 1e30), torch.full((96,), -2.0)])
    y = multiply(native, matrix, x)
    assert not y[0].any()
    assert y[1].abs().max() < 1e-36
    assert_near(y[2:], x[2:].double() @ weights.T, 1e-5)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacked(native: ctypes.CDLL, bits: int, dtype: torch.dtype) -> None:  # noqa: F811
    torch.manual_seed(0)
    for rows, columns in ((1, 32), (9, 96), (37, 576)):
        tiles = packed(rows, columns, bits)
        matrix, out = described(tiles, None, rows, columns, kind_of(bits)), torch.full((rows + 1, columns), GUARD)
        out = out.to(dtype)
        native.h2o_unpack(
            ctypes.byref(matrix),
            ctypes.c_void_p(out.data_ptr()),
            *map(ctypes.c_int64, (dtype == torch.bfloat16, 2)),
        )
        torch.testing.assert_close(
            out[:-1],
            from_tiles(tiles, rows, columns, bits).to(dtype),
            rtol=1e-2 if dtype == torch.bfloat16 else 1e-6,
            atol=1e-7,
        )
        assert out[-1].eq(GUARD).all()
