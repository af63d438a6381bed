"""Matrices times vectors, for every kind and instruction set, against float64."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from h2o_stream.native.abi import Matrix, MatrixKind
from h2o_stream.native.packing import GROUP, columns_fit
from tests.in_turn import in_turn
from tests.packed_tiles import KINDS, numbers, random_tiles

GUARD = 123.5
"""Padding after an output, which must stay untouched."""


def vectors(count: int, columns: int) -> tuple[Tensor, Tensor]:
    """Random vectors, and in float64 the same as packed matrices see them; no element is halfway between two codes."""
    groups = torch.randn(count, columns // GROUP, GROUP) * 10.0 ** torch.randint(-3, 4, (count, 1, 1))
    steps = groups.double().abs().amax(-1, keepdim=True) / 8127
    groups[((groups / steps).frac().abs() - 0.5).abs() < 1e-2] = 0
    return groups.flatten(1), ((groups / steps).round() * steps).flatten(1)


def described(weights: Tensor, bias: Tensor | None, rows: int, columns: int, kind: int) -> Matrix:
    return Matrix(weights.data_ptr(), None if bias is None else bias.data_ptr(), rows, columns, kind)


def multiply(library: ctypes.CDLL, matrix: Matrix, x: Tensor, threads: int = 1, in_bfloat16: bool = False) -> Tensor:
    out = torch.full((len(x) * matrix.rows + 1,), GUARD)
    failed = library.h2o_multiply(
        ctypes.byref(matrix),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        *map(ctypes.c_int64, (len(x), in_bfloat16, threads)),
    )
    assert not failed
    assert out[-1] == GUARD
    return out[:-1].view(len(x), matrix.rows)


def assert_near(y: Tensor, expected: Tensor, share: float) -> None:
    """Assert that errors stay within a share of each expected vector's RMS."""
    rms = expected.square().mean(1, keepdim=True).sqrt()
    assert ((y.double() - expected).abs() <= share * rms).all()


COUNTS = [1, 2, 3, 4, 5, 6, 7, 8, 16, 33]


@in_turn("kind", [MatrixKind.FLOAT32, MatrixKind.BFLOAT16, MatrixKind.FLOAT32_COLUMNS, MatrixKind.BFLOAT16_COLUMNS])
@in_turn("columns", [1, 7, 16, 40, 576])
def test_dense(native: ctypes.CDLL, kind: int, columns: int) -> None:
    torch.manual_seed(columns)
    for rows in (*range(1, 10), 37):
        weights = torch.randn(rows, columns)
        if kind in (MatrixKind.BFLOAT16, MatrixKind.BFLOAT16_COLUMNS):
            weights = weights.bfloat16()
        bias = torch.randn(rows) if rows % 2 else None
        by_column = kind in (MatrixKind.FLOAT32_COLUMNS, MatrixKind.BFLOAT16_COLUMNS)
        stored = weights.T.contiguous() if by_column else weights
        matrix = described(stored, bias, rows, columns, kind)
        for count in COUNTS:
            x = torch.randn(count, columns)
            expected = x.double() @ weights.double().T + (0 if bias is None else bias.double())
            scale = x.double().square().mean(1, keepdim=True).sqrt() * columns**0.5
            assert ((multiply(native, matrix, x).double() - expected).abs() <= 1e-5 * scale + 1e-6).all()


SHAPES = [
    (kind, columns) for kind in KINDS for columns in (32, 64, 96, 256, 288, 576, 4096) if columns_fit(kind, columns)
]
"""Packed kinds with valid numbers of columns."""


@in_turn("kind, columns", [(kind, columns) for kind, columns in SHAPES if columns < 4096 or kind == KINDS[0]])
def test_packed(native: ctypes.CDLL, kind: MatrixKind, columns: int) -> None:
    torch.manual_seed(columns)
    for rows in (1, 15, 16, 17, 40):
        tiles = random_tiles(kind, rows, columns, rows)
        weights = numbers(tiles, kind, rows, columns)
        bias = torch.randn(rows) if rows % 2 else None
        matrix = described(tiles, bias, rows, columns, kind)
        for count in (*range(1, 14), 33):
            x, rounded = vectors(count, columns)
            expected = rounded @ weights.T
            norm = weights.square().mean().sqrt() * x.double().square().mean(1, keepdim=True).sqrt() * columns**0.5
            y = multiply(native, matrix, x).double() - (0 if bias is None else bias.double())
            assert ((y - expected).abs() <= 1e-5 * norm + (0 if bias is None else 1e-6)).all()


def kinds_and_weights(rows: int, columns: int) -> list[tuple[int, Tensor]]:
    weights = torch.randn(rows, columns)
    few_bits = [(kind, random_tiles(kind, rows, columns)) for kind in KINDS if columns_fit(kind, columns)]
    columns_first = (MatrixKind.FLOAT32_COLUMNS, weights.T.contiguous())
    return [(MatrixKind.FLOAT32, weights), (MatrixKind.BFLOAT16, weights.bfloat16()), columns_first, *few_bits]


@pytest.mark.parametrize("columns", [576, 768])
def test_results_do_not_depend_on_threads_or_other_vectors(native: ctypes.CDLL, columns: int) -> None:
    torch.manual_seed(0)
    for kind, weights in kinds_and_weights(403, columns):
        matrix, x = described(weights, None, 403, columns, kind), torch.randn(13, columns)
        together = multiply(native, matrix, x)
        for threads in (2, 3):
            assert multiply(native, matrix, x, threads).equal(together)
        for vector in range(13):
            alone = multiply(native, matrix, x[vector : vector + 1])
            if kind in (MatrixKind.FLOAT32, MatrixKind.BFLOAT16):  # summed in another order
                assert_near(alone, together[vector : vector + 1].double(), 1e-5)
            else:
                assert alone.equal(together[vector : vector + 1])


@in_turn("kind", KINDS)
@in_turn("columns", [32, 96, 256, 1056])
def test_in_bfloat16(native: ctypes.CDLL, kind: MatrixKind, columns: int) -> None:
    """Both may be rounded to bfloat16 where that is faster; nothing else is lost, whatever the numbers of rows are."""
    if not columns_fit(kind, columns):
        return
    for rows, count in ((1, 17), (16, 20), (33, 64), (100, 40)):
        torch.manual_seed(rows)
        x, tiles, bias = torch.randn(count, columns), random_tiles(kind, rows, columns), torch.randn(rows)
        weights = numbers(tiles, kind, rows, columns)
        expected = x.double() @ weights.T + bias
        matrix = described(tiles, bias, rows, columns, kind)
        size = (x.double().abs() @ weights.abs().T).max()
        found = [multiply(native, matrix, x, threads, in_bfloat16=True) for threads in (1, 2, 3)]
        assert (found[0] - expected).abs().max() < 2.0**-8 * size
        assert all(torch.equal(found[0], other) for other in found[1:])


@in_turn("kind", KINDS)
def test_prompts_give_the_numbers_of_single_vectors(native: ctypes.CDLL, kind: MatrixKind) -> None:
    """More vectors and columns than the cache holds at a time."""
    torch.manual_seed(0)
    columns = 1056 if columns_fit(kind, 1056) else 1280
    tiles, bias, x = random_tiles(kind, 41, columns), torch.randn(41), torch.randn(260, columns)
    matrix = described(tiles, bias, 41, columns, kind)
    expected = torch.cat([multiply(native, matrix, vector[None]) for vector in x])
    for threads in (1, 2, 3):
        assert multiply(native, matrix, x, threads).equal(expected)


def test_results_do_not_depend_on_earlier_products(native: ctypes.CDLL) -> None:
    """Vector buffers are reused, for shorter vectors and after non-finite ones."""
    torch.manual_seed(0)
    for columns in (768, 96):
        for kind, weights in kinds_and_weights(8, columns):
            matrix, x = described(weights, None, 8, columns, kind), torch.randn(3, columns)
            before = multiply(native, matrix, x)
            for wide, nans in kinds_and_weights(8, 1536):
                multiply(native, described(nans, None, 8, 1536, wide), torch.full((40, 1536), torch.nan))
            assert multiply(native, matrix, x).equal(before)


@in_turn("kind", KINDS)
@in_turn("value", [torch.nan, torch.inf])
def test_what_is_not_finite_shows(native: ctypes.CDLL, kind: MatrixKind, value: float) -> None:
    tiles, x = random_tiles(kind, 8, 512), torch.randn(2, 512)
    x[1, 40] = value
    y = multiply(native, described(tiles, None, 8, 512, kind), x)
    assert y[0].isfinite().all()
    assert not y[1].isfinite().any()


@in_turn("kind", KINDS)
def test_extreme_vectors(native: ctypes.CDLL, kind: MatrixKind) -> None:
    tiles = random_tiles(kind, 8, 256)
    matrix, weights = described(tiles, None, 8, 256, kind), numbers(tiles, kind, 8, 256)
    alternating = torch.tensor([1.0, -1.0]).repeat(128)
    x = torch.stack(
        [torch.zeros(256), torch.full((256,), 1e-41), torch.full((256,), 1e30), -torch.ones(256), alternating]
    )
    y = multiply(native, matrix, x)
    assert not y[0].any()
    assert y[1].abs().max() < 1e-36
    assert_near(y[2:], x[2:].double() @ weights.T, 1e-5)


BITS = {
    MatrixKind.INT8: 8, MatrixKind.Q6_K: 6, MatrixKind.INT5: 5, MatrixKind.Q5_K: 5, MatrixKind.Q3_K: 3,
    MatrixKind.Q2_K: 2,
}  # fmt: skip
"""Of codes that are not 4."""


@in_turn("kind", KINDS)
def test_extreme_codes(native: ctypes.CDLL, kind: MatrixKind) -> None:
    """The largest dot products of either sign."""
    for byte in (0x00, 0x7F, 0x80, 0x81, 0xFF):
        tiles = random_tiles(kind, 16, 256)
        size = 16 * 256 * BITS.get(kind, 4) // 8
        tiles[:, -size:] = byte
        weights = numbers(tiles, kind, 16, 256)
        x = torch.stack((torch.ones(256), -torch.ones(256)))
        assert_near(multiply(native, described(tiles, None, 16, 256, kind), x), x.double() @ weights.T, 1e-5)


@in_turn("dtype", [torch.float32, torch.bfloat16])
@in_turn("kind, columns", SHAPES)
def test_rows_by_number(
    native: ctypes.CDLL,
    kind: MatrixKind,
    columns: int,
    dtype: torch.dtype,
) -> None:
    """Results are rounded once to float32 and, for bfloat16, once more."""
    tiles, rows = random_tiles(kind, 67, columns), torch.tensor([66, 0, 15, 16, 31, 31, 40])
    expected = numbers(tiles, kind, 67, columns).float().to(dtype)
    matrix = described(tiles, None, 67, columns, kind)
    for threads in (1, 2, 3):
        out = torch.full((len(rows) + 1, columns), GUARD, dtype=dtype)
        native.h2o_gather(
            ctypes.byref(matrix), rows.data_ptr(), len(rows), out.data_ptr(), dtype == torch.bfloat16, threads
        )
        assert out[:-1].equal(expected[rows])
        assert out[-1].eq(GUARD).all()


def test_on_any_processor(portable: ctypes.CDLL) -> None:
    for kind, weights in kinds_and_weights(37, 768):
        x = torch.randn(3, 768)
        numbered = numbers(weights, kind, 37, 768) if kind in KINDS else weights.double().view(37, -1)
        if kind == MatrixKind.FLOAT32_COLUMNS:
            numbered = weights.double().T
        found = multiply(portable, described(weights, None, 37, 768, kind), x)
        assert_near(found, x.double() @ numbered.T, 1e-3)
