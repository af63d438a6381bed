"""Products with the matrices of a description, of few rows by kernels of ours and of more by the library's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional

from h2o_stream.gpu import available
from h2o_stream.gpu.packed import FEW, BlockMatrix, dense_product, multiply_blocks, products_of_rows
from h2o_stream.gpu.products import gate_kernel, gemv_kernel, norm_in_place_kernel
from h2o_stream.native.abi import NormKind
from h2o_stream.native.description import Matrix, Norm
from h2o_stream.native.matrix import NO_NORM

GATE_COLUMNS = 1024
"""Of a program of `gate_kernel`."""


def rows_of(matrix: Matrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [n, columns] of an embedding."""
    if isinstance(matrix, BlockMatrix):
        return matrix.rows_of(ids, dtype)
    return functional.embedding(ids, matrix.weights).to(dtype)


def multiply(matrices: Sequence[Matrix], x: Tensor, norm: Norm = NO_NORM, dtype: torch.dtype | None = None) -> Tensor:
    """[rows, *] products of x [rows, K] with matrices below each other; with the norm, for few rows."""
    if len(x) <= FEW:
        return gemv(matrices, x, norm, dtype=dtype)
    assert not norm.kind
    parts = products(matrices, x)
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).to(dtype or x.dtype)


def products(matrices: Sequence[Matrix], x: Tensor) -> list[Tensor]:
    """[rows, *] products of more rows, of a matrix or of some that follow one another."""
    parts = []
    for alike in _joined(matrices):
        if isinstance(alike[0], BlockMatrix):
            parts += products_of_rows(alike, x)
        else:
            parts += [dense_product(matrix, matrix.weights.to(x.dtype), x) for matrix in alike]
    return parts


def gemv(
    matrices: Sequence[Matrix],
    x: Tensor,
    norm: Norm = NO_NORM,
    added: Tensor | None = None,
    add_scale: float = 1.0,
    gated: bool = False,
    activation: int = -1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """[M, N] for few rows, the same as of each alone; see `gemv_kernel`."""
    rows = [matrix.rows for matrix in matrices]
    out = torch.empty(len(x), rows[0] if gated else sum(rows), dtype=dtype or x.dtype, device=x.device)
    rest = norm, added, add_scale, activation
    if gated and len(_joined(matrices)) == 1 and matrices[0].scale == 1:
        _product(matrices, x, out, True, *rest)
    elif gated:  # of two kinds, or scaled
        gate, up = (gemv([matrix], x, norm) for matrix in matrices)
        gate_kernel[len(x), triton.cdiv(rows[0], GATE_COLUMNS)](
            gate, up, out, rows[0], rows[0], ACTIVATION=activation, BN=GATE_COLUMNS, **overlapping(x)
        )
    else:
        groups = _joined(matrices)
        parts = out.split([sum(matrix.rows for matrix in alike) for alike in groups], 1)
        for alike, part in zip(groups, parts, strict=True):
            _product(alike, x, part, False, *rest)
    return out


def _joined(matrices: Sequence[Matrix]) -> list[list[Matrix]]:
    """Matrices that one kernel can read: up to three that follow one another and are alike."""
    alike = [[*group] for _, group in groupby(matrices, _kind)]
    return [group[first : first + 3] for group in alike for first in range(0, len(group), 3)]


def _kind(matrix: Matrix) -> Any:
    """What has to be the same in matrices that one kernel reads."""
    return matrix.weights.dtype, matrix.scale, matrix.bias is None, getattr(matrix, "type", None)


def _product(
    matrices: Sequence[Matrix], x: Tensor, out: Tensor, gated: bool, norm: Norm, added: Tensor | None,
    add_scale: float, activation: int,
) -> None:  # fmt: skip
    """Launch the kernel for matrices that are alike."""
    if isinstance(matrices[0], BlockMatrix):
        multiply_blocks(matrices, x, out, norm, added, add_scale, activation, gated, overlapping(x))
        return
    rows, columns = [matrix.rows for matrix in matrices], matrices[0].columns
    lines, most, warps = (4, 2048, 8) if added is None and not gated else (2, 4096 if columns <= 4096 else 2048, 4)
    if len(x) > 2:
        lines //= 2  # registers hold as many sums as vectors
    while any(size % lines for size in rows):
        lines //= 2
    weights, biases = ([getattr(m, name) for m in matrices] + [None] * (3 - len(rows)) for name in ("weights", "bias"))
    gemv_kernel[(out.shape[1] // lines,)](
        x, *weights, *biases, norm.weight, added, out, rows[0], rows[1] if len(rows) > 1 else 0, out.stride(0),
        norm.epsilon, matrices[0].scale, add_scale, M=len(x), K=columns, GATED=gated, ACTIVATION=activation, BN=lines,
        BK=column_block(columns, most), num_warps=warps, **overlapping(x),
    )  # fmt: skip


def in_products(norm: Norm) -> bool:
    """Whether `gemv_kernel` can apply a norm."""
    return norm.kind == NormKind.RMS and norm.bias is None


def norm_in_place(x: Tensor, *parts: tuple[int, Norm]) -> None:
    """Put one or two parts of rows [n, *], from some columns on, under norms to which `in_products` does not object."""
    (start, norm), (second_start, second) = *parts, *[(0, NO_NORM)] * (2 - len(parts))
    sizes = [0 if weight is None else len(weight) for weight in (norm.weight, second.weight)]
    norm_in_place_kernel[len(x), len(parts)](
        x, norm.weight, second.weight, x.stride(0), start, second_start, *sizes, norm.epsilon, second.epsilon,
        BK=triton.next_power_of_2(max(sizes)), num_warps=8, **overlapping(x),
    )  # fmt: skip


def column_block(columns: int, most: int) -> int:
    """The power of two, 256 to `most`, whose multiple above `columns` is the least; the largest of several."""
    sizes = [size for size in (256, 512, 1024, 2048, 4096) if size <= most]
    return min(reversed(sizes), key=lambda size: triton.cdiv(columns, size) * size)


def overlapping(x: Tensor) -> dict[str, Any]:
    """Arguments of a kernel that may start while the one before it ends.

    What it loads before is older than the embedding of the tokens, which waits for everything.
    """
    overlaps = available.overlaps(x.device)
    return {"PDL": True, "launch_pdl": True} if overlaps else {"PDL": False}


def lines_of(rows: int, limit: int = 4) -> int:
    """Lines of a program, a power of two up to a limit, that divide the rows."""
    return math.gcd(rows, limit)
