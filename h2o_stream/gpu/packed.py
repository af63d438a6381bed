"""Linear layers and embeddings whose weights stay in the blocks of a GGUF file, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import Any

import numpy
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from h2o_stream.gpu import available
from h2o_stream.gpu.block_gemv import blocks_gemv_kernel
from h2o_stream.gpu.blocks import blocks_rows_kernel, offset_bits, unpack_kernel
from h2o_stream.gpu.repacking import Planes, planes, repack
from h2o_stream.native.description import Matrix, Norm
from h2o_stream.native.gguf_types import BLOCKS, TensorType
from h2o_stream.native.matrix import NO_NORM
from h2o_stream.native.packing import GGUF_KINDS

_GROUP = 32
"""Weights that share a scale."""

_TILES, _MAX_WARPS = 3, 16
"""Groups of a row that a thread may have of a product with a vector, and warps of a program that does."""

FEW = 4
"""Vectors that are multiplied as if each were alone, in the registers of one kernel."""

_SOME, _MANY_LINES, _MANY_GROUPS = 64, 32, 8
"""Vectors that a matrix is multiplied by as it is in blocks, and lines and groups of a program then."""

_UNPACKED_LINES, _UNPACKED_GROUPS = 4, 64

_NO_LINE = 2**31 - 1
"""Where a matrix begins that there is not."""

_REPACKED = 1 << 12
"""Rows that are repacked at once."""

_TOLERANCE = 1e-5
"""Relative difference between numbers that are unpacked on a device and on the host."""


@dataclass(frozen=True, eq=False)
class BlockMatrix(Matrix):
    """A matrix of one of the `TYPES`; weights are packed bytes, and `kind` is what a CPU repacks them to."""

    type: TensorType = TensorType.Q4_0

    @property
    def planes(self) -> Planes:
        """Its arrays."""
        return planes(self.weights, self.type, self.rows, self.columns)

    def rows_of(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows [n, columns] of ids [n], unpacked."""
        out, groups = torch.empty(len(ids), self.columns, dtype=dtype, device=ids.device), self.columns // _GROUP
        grid = triton.cdiv(len(ids), _UNPACKED_LINES), triton.cdiv(groups, _UNPACKED_GROUPS)
        if len(ids):
            with available.on(out.device):
                unpack_kernel[grid](
                    *self.planes, ids, out, len(ids), K=self.columns, TYPE=int(self.type), BN=_UNPACKED_LINES,
                    J=_UNPACKED_GROUPS, offset_bits=offset_bits(self.type),
                )  # fmt: skip
        return out

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """[rows, columns]"""
        return self.rows_of(torch.arange(self.rows, device=self.weights.device), dtype)


def block_matrix(packed: Tensor, bias: Tensor | None, kind: TensorType, rows: int, columns: int) -> BlockMatrix:
    """A matrix of packed bytes."""
    bias = None if bias is None else bias.detach().float()
    return BlockMatrix(packed, bias, rows, columns, GGUF_KINDS[kind.name], type=kind)


def multiply_blocks(
    matrices: Sequence[Any],
    x: Tensor,
    out: Tensor,
    norm: Norm = NO_NORM,
    added: Tensor | None = None,
    add_scale: float = 1.0,
    activation: int = -1,
    gated: bool = False,
    options: dict[str, Any] | None = None,
) -> None:
    """Write products with few vectors [M, K] to out [M, N]: of up to three matrices that are alike below each other; or
    of gates and another one, if they are `gated`.
    """
    matrix = matrices[0]
    warps, tiles = _shape(matrix.columns // _GROUP)
    # As registers allow, also for how many of these programs a processor runs at once.
    lines, resident = (4, 12 // warps) if tiles == 1 else (1 if gated else 2, 8 // warps)
    while any(each.rows % lines for each in matrices):
        lines //= 2
    batches = out.shape[1] // lines
    programs = min(batches, max(available.processors(x.device) * max(resident, 1), 1))
    with available.on(x.device):
        blocks_gemv_kernel[(programs,)](
            x, **_arguments(matrices), norm=norm.weight, added=added, out=out, batches=batches, stride=out.stride(0),
            eps=norm.epsilon, add_scale=add_scale, M=len(x), GATED=gated, ACTIVATION=activation, J=32 * warps,
            TILES=tiles, BN=lines, num_warps=warps, **(options or {"PDL": False}),
        )  # fmt: skip


def _arguments(matrices: Sequence[Any]) -> dict[str, Any]:
    """Arguments of a kernel, by name, for up to three matrices that are alike."""
    matrix, line = matrices[0], 0
    arguments = {
        "offset_bits": offset_bits(matrix.type), "scale": matrix.scale, "K": matrix.columns, "TYPE": int(matrix.type),
    }  # fmt: skip
    for name, each in zip_longest(("", "second_", "third_"), matrices):
        arrays = each.planes if each else (None, None, None)
        arguments |= {f"{name}{plane}": x for plane, x in zip(Planes._fields, arrays, strict=True)}
        arguments[f"{name}bias"] = each and each.bias
        if name:
            arguments[f"{name}line"] = line if each else _NO_LINE
        line += each.rows if each else 0
    return arguments


@cache
def _shape(groups: int) -> tuple[int, int]:
    """Warps of a program and groups of each thread for a row of so many groups: few threads have none, or one less."""
    shapes = [(warps, -(-groups // (32 * warps))) for warps in (1, 2, 4, 8, 16, 32)]
    fitting = [shape for shape in shapes if shape[1] <= _TILES and shape[0] <= _MAX_WARPS] or shapes[-1:]
    return min(fitting, key=lambda shape: (shape[0] * shape[1], shape[1]))


def dense_product(matrix: Matrix, weights: Tensor, x: Tensor) -> Tensor:
    """[n, rows] products of vectors [n, columns] with a matrix whose weights are these, in the dtype of the vectors."""
    bias = None if matrix.bias is None else matrix.bias.to(x.dtype)
    product = functional.linear(x, weights, bias)
    return product if matrix.scale == 1 else product * matrix.scale


def products_of_rows(matrices: Sequence[Any], x: Tensor) -> list[Tensor]:
    """[n, *] products of vectors [n, columns] with up to three matrices that are alike: in one tensor; or of each alone
    after unpacking, of many vectors, or in float32, which fills registers.
    """
    if len(x) > _SOME or x.dtype == torch.float32:
        return [dense_product(matrix, matrix.unpacked(x.dtype), x) for matrix in matrices]
    if any(matrix.rows % _MANY_LINES for matrix in matrices[:-1]):
        return [product for matrix in matrices for product in products_of_rows([matrix], x)]
    lines = sum(matrix.rows for matrix in matrices)
    out = x.new_empty(len(x), lines)
    with available.on(x.device):
        blocks_rows_kernel[(triton.cdiv(lines, _MANY_LINES),)](
            x.contiguous(), **_arguments(matrices), out=out, rows=len(x), lines_count=lines,
            BM=max(triton.next_power_of_2(len(x)), 16), BN=_MANY_LINES, J=_MANY_GROUPS, num_warps=4, num_stages=2,
        )  # fmt: skip
    return [out]


class BlockLinear(nn.Module):
    """y = x W' + b, with W as blocks of a type, in packed bytes."""

    blocks: Tensor

    def __init__(self, blocks: Tensor, kind: TensorType, rows: int, columns: int, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("blocks", blocks)
        self.kind, self.out_features, self.in_features, self.bias = kind, rows, columns, bias

    def matrix(self) -> BlockMatrix:
        """As part of a description."""
        return block_matrix(self.blocks, self.bias, self.kind, self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        rows = x.flatten(0, -2)
        if len(rows) > FEW:
            return products_of_rows([self.matrix()], rows)[0].view(*x.shape[:-1], -1)
        out = x.new_empty(len(rows), self.out_features)
        if len(rows):
            multiply_blocks([self.matrix()], rows.contiguous(), out)
        return out.view(*x.shape[:-1], -1)


class BlockEmbedding(nn.Module):
    """An embedding with weights as blocks of a type, in packed bytes; its rows have this dtype and are scaled."""

    blocks: Tensor

    def __init__(
        self, blocks: Tensor, kind: TensorType, rows: int, columns: int, dtype: torch.dtype, embed_scale: float = 1.0
    ) -> None:
        super().__init__()
        self.register_buffer("blocks", blocks)
        self.kind, self.num_embeddings, self.columns = kind, rows, columns
        self.dtype, self.embed_scale = dtype, embed_scale

    def matrix(self) -> BlockMatrix:
        """As part of a description."""
        return block_matrix(self.blocks, None, self.kind, self.num_embeddings, self.columns)

    def forward(self, ids: Tensor) -> Tensor:
        """[...] to [..., columns]."""
        rows = self.matrix().rows_of(ids.flatten(), self.dtype).view(*ids.shape, -1)
        return rows if self.embed_scale == 1 else rows * torch.tensor(self.embed_scale, dtype=self.dtype, device="cpu")


def repacked(blocks: NDArray[numpy.uint8], kind: TensorType, device: torch.device) -> Tensor:
    """Packed bytes of blocks [rows, bytes] on a device. Twice in blocks, a large vocabulary may not fit."""
    (rows, size), (count, block) = blocks.shape, BLOCKS[kind]
    columns = size // block * count
    packed = torch.empty(blocks.size, dtype=torch.uint8, device=device)
    into = planes(packed, kind, rows, columns)
    for first in range(0, rows, _REPACKED):
        part = slice(first, min(first + _REPACKED, rows))
        repack(torch.from_numpy(blocks[part].copy()).to(device), kind, columns, into.rows(part))
    return packed


def reads(blocks: NDArray[numpy.uint8], kind: TensorType, device: torch.device) -> bool:
    """Whether a device makes of blocks [rows, bytes] what the package gguf does."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    wanted = torch.from_numpy(dequantize(blocks, GGMLQuantizationType(kind)))
    matrix = block_matrix(repacked(blocks, kind, device), None, kind, *wanted.shape)
    return torch.allclose(matrix.unpacked(torch.float32).cpu(), wanted, rtol=_TOLERANCE, atol=1e-7, equal_nan=True)
