"""Linear layers and embeddings whose weights stay in the blocks of a GGUF file, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from h2o_stream.gpu import available
from h2o_stream.gpu.blocks import GEOMETRY, blocks_gemv_kernel, blocks_rows_kernel, unpack_kernel
from h2o_stream.native.description import Matrix, Norm
from h2o_stream.native.gguf_types import TensorType
from h2o_stream.native.matrix import NO_NORM
from h2o_stream.native.packing import GGUF_KINDS

_LINES, _CHUNKS = 4, 8
"""Rows and chunks of a program."""

_FEW, _MANY_LINES = 64, 16
"""Vectors that a matrix is multiplied by as it is in blocks, and rows of a program then."""

_ROUNDING, _COMPARED = 2.0**-7, 1 << 12
"""Part of a number that is lost where a model has it in bfloat16, and rows that are compared at once."""


@dataclass(frozen=True, eq=False)
class BlockMatrix(Matrix):
    """A matrix of blocks [rows, bytes] uint8 in one of the types of `GEOMETRY`; `kind` is what a CPU repacks it to."""

    type: int = 0

    def rows_of(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows [n, columns], unpacked."""
        return unpack(replace(self, weights=self.weights[ids], rows=len(ids)), dtype)


def block_matrix(blocks: Tensor, bias: Tensor | None, columns: int, kind: TensorType) -> BlockMatrix:
    """A matrix of blocks [rows, bytes]."""
    bias = None if bias is None else bias.detach().float()
    return BlockMatrix(blocks, bias, len(blocks), columns, GGUF_KINDS[kind.name], type=int(kind))


def multiply_blocks(
    matrices: Sequence[Any],
    x: Tensor,
    out: Tensor,
    norm: Norm = NO_NORM,
    added: Tensor | None = None,
    add_scale: float = 1.0,
    activation: int = -1,
    options: dict[str, Any] | None = None,
) -> None:
    """Write the product with a vector [1, K] to out [1, N]: of a `BlockMatrix`, or of gates and another one."""
    matrix, second = matrices[0], matrices[1] if len(matrices) > 1 else None
    lanes, parts = GEOMETRY[matrix.type]
    lines = next(size for size in (_LINES, 2, 1) if matrix.rows % size == 0)
    with available.on(x.device):
        blocks_gemv_kernel[(matrix.rows // lines,)](
            x, matrix.weights, second and second.weights, matrix.bias, second and second.bias, norm.weight, added, out,
            matrix.weights.stride(0), norm.epsilon, matrix.scale, add_scale, K=matrix.columns,
            GATED=second is not None, ACTIVATION=activation, TYPE=matrix.type, LANES=lanes, PARTS=parts, BN=lines,
            J=_CHUNKS, num_warps=4, **(options or {"PDL": False}),
        )  # fmt: skip


def dense_product(matrix: Matrix, weights: Tensor, x: Tensor) -> Tensor:
    """[n, rows] products of vectors [n, columns] with a matrix whose weights are these, in the dtype of the vectors."""
    bias = None if matrix.bias is None else matrix.bias.to(x.dtype)
    product = functional.linear(x, weights, bias)
    return product if matrix.scale == 1 else product * matrix.scale


def product_of_rows(matrix: BlockMatrix, x: Tensor) -> Tensor:
    """[n, rows] products with vectors [n, columns]; of many, or in float32, which fills registers, after unpacking."""
    if len(x) > _FEW or x.dtype == torch.float32:
        return dense_product(matrix, unpack(matrix, x.dtype), x)
    (lanes, parts), out = GEOMETRY[matrix.type], x.new_empty(len(x), matrix.rows)
    with available.on(x.device):
        blocks_rows_kernel[(triton.cdiv(matrix.rows, _MANY_LINES),)](
            x.contiguous(), matrix.weights, matrix.bias, out, len(x), matrix.rows, matrix.weights.stride(0),
            matrix.scale, K=matrix.columns, TYPE=matrix.type, LANES=lanes, PARTS=parts,
            BM=max(triton.next_power_of_2(len(x)), 16), BN=_MANY_LINES, J=_CHUNKS // 2, num_warps=4, num_stages=2,
        )  # fmt: skip
    return out


def unpack(matrix: BlockMatrix, dtype: torch.dtype) -> Tensor:
    """[rows, columns]"""
    lanes, parts = GEOMETRY[matrix.type]
    out = torch.empty(matrix.rows, matrix.columns, dtype=dtype, device=matrix.weights.device)
    grid = triton.cdiv(matrix.rows, _LINES), triton.cdiv(matrix.columns // (lanes * parts), _CHUNKS)
    if matrix.rows:
        with available.on(out.device):
            unpack_kernel[grid](
                matrix.weights, out, matrix.rows, matrix.weights.stride(0), K=matrix.columns, TYPE=matrix.type,
                LANES=lanes, PARTS=parts, BN=_LINES, J=_CHUNKS,
            )  # fmt: skip
    return out


class BlockLinear(nn.Module):
    """y = x W' + b, with W as blocks [out, bytes] of a type."""

    blocks: Tensor

    def __init__(self, blocks: Tensor, kind: TensorType, columns: int, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("blocks", blocks)
        self.kind, self.in_features, self.bias = kind, columns, bias

    def matrix(self) -> BlockMatrix:
        """As part of a description."""
        return block_matrix(self.blocks, self.bias, self.in_features, self.kind)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        if x.numel() > self.in_features:
            return product_of_rows(self.matrix(), x.flatten(0, -2)).view(*x.shape[:-1], -1)
        out = torch.empty(*x.shape[:-1], len(self.blocks), dtype=x.dtype, device=x.device)
        multiply_blocks([self.matrix()], x.contiguous(), out)
        return out


class BlockEmbedding(nn.Module):
    """An embedding with weights as blocks [rows, bytes] of a type, which gives this dtype."""

    blocks: Tensor

    def __init__(self, blocks: Tensor, kind: TensorType, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("blocks", blocks)
        self.kind, self.columns, self.dtype, self.num_embeddings = kind, columns, dtype, len(blocks)

    def matrix(self) -> BlockMatrix:
        """As part of a description."""
        return block_matrix(self.blocks, None, self.columns, self.kind)

    def forward(self, ids: Tensor) -> Tensor:
        """[...] to [..., columns]."""
        return self.matrix().rows_of(ids.flatten(), self.dtype).view(*ids.shape, -1)


def keep_blocks(model: Any, blocks_of: Callable[[str], tuple[NDArray[numpy.uint8], TensorType] | None]) -> None:
    """Replace linear layers and the embedding of a model on a GPU by those of a file's blocks, where they are the same.

    Args:
        model: with unpacked weights.
        blocks_of: the blocks [rows, bytes] of a weight by its name, and their type; None if they are not kept.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    for module_id, name in names.items():
        module = model.get_submodule(name)
        if type(module) not in (nn.Linear, nn.Embedding) or id(module) != module_id:
            continue
        tied = module is head and module.weight is getattr(embedding, "weight", None)
        found = blocks_of(f"{names[id(embedding)] if tied else name}.weight")
        if found is None or found[1] not in GEOMETRY:
            continue
        weight, columns = module.weight.detach(), module.weight.shape[1]
        blocks, kind = torch.from_numpy(found[0].copy()).to(weight.device), found[1]
        if not _are_same(block_matrix(blocks, None, columns, kind), weight):
            continue  # in another order, for one
        if module is embedding:
            packed: nn.Module = BlockEmbedding(blocks, kind, columns, weight.dtype)
        else:
            packed = BlockLinear(blocks, kind, columns, module.bias)
        model.set_submodule(name, packed)


def _are_same(matrix: BlockMatrix, weight: Tensor) -> bool:
    """Whether blocks are a weight up to its rounding. Of a large vocabulary all rows in float32 may not fit."""
    for blocks, rows in zip(matrix.weights.split(_COMPARED), weight.split(_COMPARED), strict=True):
        wanted = rows.float()
        difference = unpack(replace(matrix, weights=blocks, rows=len(blocks)), torch.float32) - wanted
        if bool((difference.abs() > _ROUNDING * wanted.abs().clamp_min(1e-6)).any()):
            return False
    return True
