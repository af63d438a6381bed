"""Products with the matrices of a description, of few rows by kernels of ours and of more by the library's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional

from h2o_stream.gpu import available
from h2o_stream.gpu.packed import FEW, BlockMatrix, dense_product, multiply_blocks, product_of_rows
from h2o_stream.gpu.products import gate_kernel, gemv_kernel
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
    products = []
    for matrix in matrices:
        if isinstance(matrix, BlockMatrix):
            products.append(product_of_rows(matrix, x))
        else:
            products.append(dense_product(matrix, matrix.weights.to(x.dtype), x))
    return (products[0] if len(products) == 1 else torch.cat(products, 1)).to(dtype or x.dtype)


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
    if gated and _is_alike(matrices):
        _product(matrices, x, out, True, *rest)
    elif gated:  # of two kinds
        gate, up = (gemv([matrix], x, norm) for matrix in matrices)
        gate_kernel[len(x), triton.cdiv(rows[0], GATE_COLUMNS)](
            gate, up, out, rows[0], ACTIVATION=activation, BN=GATE_COLUMNS, **overlapping(x)
        )
    elif len(matrices) <= 3 and _is_alike(matrices) and not isinstance(matrices[0], BlockMatrix):
        _product(matrices, x, out, False, *rest)
    else:
        for matrix, part in zip(matrices, out.split(rows, 1), strict=True):
            _product([matrix], x, part, False, *rest)
    return out


def _is_alike(matrices: Sequence[Matrix]) -> bool:
    """Whether one kernel can read all of these."""
    return len({(m.weights.dtype, m.scale, m.bias is None, getattr(m, "type", None)) for m in matrices}) == 1


def _product(
    matrices: Sequence[Matrix], x: Tensor, out: Tensor, gated: bool, norm: Norm, added: Tensor | None,
    add_scale: float, activation: int,
) -> None:  # fmt: skip
    """Launch the kernel for matrices that are alike."""
    if isinstance(matrices[0], BlockMatrix):
        multiply_blocks(matrices, x, out, norm, added, add_scale, activation, overlapping(x))
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


def lines_of(rows: int) -> int:
    """Lines of a program that divide the rows."""
    return next(lines for lines in (4, 2, 1) if rows % lines == 0)
