"""What follows attention in a layer: MLPs, and mixtures of experts.

With n experts for a token, a step of R rows reads the matrices of R n experts if R is at most `FEW`, and else those of
each chosen expert once for every 16 or 64 pairs: of 128 experts, 8 for a token, 32 rows choose about 112, not 256.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from h2o_stream.gpu.blocks import offset_bits
from h2o_stream.gpu.experts import (
    experts_kernel,
    experts_out_kernel,
    grouped_blocks_kernel,
    grouped_kernel,
    route_kernel,
    sort_kernel,
    sum_kernel,
)
from h2o_stream.gpu.matrices import (
    GATE_COLUMNS,
    column_block,
    gemv,
    in_products,
    lines_of,
    multiply,
    norm_in_place,
    overlapping,
    products,
)
from h2o_stream.gpu.packed import FEW, BlockMatrix
from h2o_stream.gpu.products import gate_kernel
from h2o_stream.native.abi import Activation, GateLayout, GroupWorth, MatrixKind, Scoring
from h2o_stream.native.description import Mlp, Norm
from h2o_stream.native.experts import Experts
from h2o_stream.native.matrix import NO_NORM

_COLUMNS = {MatrixKind.FLOAT32_COLUMNS, MatrixKind.BFLOAT16_COLUMNS}

DENSE = {MatrixKind.FLOAT32, MatrixKind.BFLOAT16, *_COLUMNS}

_LINES, _BLOCK_LINES, _BLOCK_GROUPS, _SORTED = 64, 32, 8, 1024
"""Lines of a program of `grouped_kernel`, lines and groups of one of `grouped_blocks_kernel`, and pairs that one of
`sort_kernel` looks at in a turn."""


def why_not(mlp: Any) -> str:
    """Why these kernels do not compute an MLP or experts, or nothing."""
    return _why_not_experts(mlp) if isinstance(mlp, Experts) else _why_not_mlp(mlp)


def _why_not_mlp(mlp: Any) -> str:
    norm, special = mlp.inner_norm, mlp.gate_deviations is not None or mlp.activation > Activation.RELU_SQUARED
    if special or (norm.kind and not in_products(norm)):
        return "its MLP is special"
    return ""


def _why_not_experts(experts: Experts) -> str:
    router, matrices = experts.router, [matrix for matrix in (experts.gate, experts.up, experts.down) if matrix]
    special = router.scoring == Scoring.SPARSE_MIXER or experts.beside
    if special or experts.activation == Activation.XIELU or any(matrix.scale != 1 for matrix in matrices):
        return "its experts are special"
    packed = {isinstance(matrix, BlockMatrix) for matrix in matrices}
    if len(packed) > 1 or (True in packed and experts.stride != experts.inner_size):
        return "its experts are packed in part"
    if True in packed and (router.weighs_inputs or any(matrix.bias is not None for matrix in matrices)):
        return "its packed experts have biases, or what goes into them is weighed"
    return _why_not_mlp(experts.shared) if experts.shared else ""


def inner(mlp: Mlp, x: Tensor, norm: Norm) -> Tensor:
    """[rows, inner], what the last matrix of an MLP is multiplied with."""
    out = _gated(mlp, x, norm)
    if mlp.inner_norm.kind:
        norm_in_place(out, (0, mlp.inner_norm))
    return out


def _gated(mlp: Mlp, x: Tensor, norm: Norm) -> Tensor:
    activation, matrices, size = int(mlp.activation), [mlp.gate, mlp.up] if mlp.gate else [mlp.up], mlp.up.rows
    if len(x) <= FEW:
        return gemv(matrices, x, norm, gated=mlp.gate is not None, activation=activation)
    parts = products(matrices, x)  # one, if they are joined
    return let_through(parts[0][:, :size], parts[-1][:, -size:] if mlp.gate else None, activation)


def let_through(gate: Tensor, up: Tensor | None, activation: int) -> Tensor:
    """[rows, n] that gates [rows, n] let through, perhaps in their place; or gates under an activation."""
    out, (rows, size) = gate if gate.is_contiguous() else gate.new_empty(gate.shape), gate.shape
    gate_kernel[rows, triton.cdiv(size, GATE_COLUMNS)](
        gate, up, out, gate.stride(0), size, ACTIVATION=int(activation), BN=GATE_COLUMNS, **overlapping(gate)
    )
    return out


def mixed(experts: Experts, x: Tensor, norm: Norm) -> Tensor:
    """[rows, hidden], what the experts of each row give, and the shared one."""
    router, count = experts.router, experts.router.chosen
    logits = multiply([router.matrix], x if len(x) <= FEW else x.float(), norm, dtype=torch.float32)
    chosen = torch.empty(len(x), count, dtype=torch.int32, device=x.device)
    weights = torch.empty(len(x), count, dtype=torch.float32, device=x.device)
    route_kernel[(len(x),)](
        logits, router.choice_bias, router.factors, chosen, weights, router.scale, E=experts.count, CHOSEN=count,
        EP=triton.next_power_of_2(experts.count), SIGMOID=router.scoring == Scoring.SIGMOID,
        NORMALIZED=router.normalized, GROUPS=router.groups, DROPPED=router.groups - router.chosen_groups,
        BEST_TWO=router.group_worth == GroupWorth.BEST_TWO, **overlapping(x),
    )  # fmt: skip
    added = None
    if experts.shared:
        added = multiply([experts.shared.down], inner(experts.shared, x, norm))
        if experts.shared_gate:
            added *= multiply([experts.shared_gate], x, norm, dtype=torch.float32).sigmoid()
    if len(x) <= FEW and not isinstance(experts.down, BlockMatrix):
        return _of_few_rows(experts, x, norm, chosen, weights, added)
    pairs = grouped(chosen, experts.count, alone=len(x) <= FEW)
    multiplied = _of_blocks if isinstance(experts.down, BlockMatrix) else _of_many_rows
    of_inputs, of_outputs = (weights, None) if router.weighs_inputs else (None, weights)
    return weighted_sum(multiplied(experts, x, norm, pairs, of_inputs), pairs.chosen, of_outputs, added)


class _Sides(NamedTuple):
    """The first matrices of experts as arguments of kernels: weights and biases of gates, and of what they are for."""

    gate: Tensor | None
    up: Tensor
    gate_bias: Tensor | None
    bias: Tensor | None

    @classmethod
    def of(cls, experts: Experts) -> _Sides:
        """Views of the weights."""
        gate: Any = experts.gate
        if experts.gate_layout == GateLayout.APART:
            up: Any = experts.up
            return cls(gate and gate.weights, up.weights, gate and gate.bias, up.bias)
        if experts.gate_layout == GateLayout.IN_TURNS:
            return cls(None, gate.weights, None, gate.bias)
        weights, size = gate.weights.flatten(), experts.inner_size
        return cls(weights, weights[size:], gate.bias, None if gate.bias is None else gate.bias[size:])


def _steps(matrix: Any, stride: int) -> dict[str, Any]:
    """How far apart the lines and columns of a matrix are, whose experts are `stride` lines apart."""
    in_columns = matrix.kind in _COLUMNS
    return {"LINE": 1, "COLUMN": stride} if in_columns else {"LINE": matrix.columns, "COLUMN": 1}


def _activation(experts: Experts) -> dict[str, Any]:
    return {"ACTIVATION": int(experts.activation), "PARAMETERS": (*experts.parameters,)}


_NO_ACTIVATION = {"ACTIVATION": -1, "PARAMETERS": ()}


def _of_few_rows(
    experts: Experts, x: Tensor, norm: Norm, chosen: Tensor, weights: Tensor, added: Tensor | None
) -> Tensor:
    size, hidden, count, down = experts.inner_size, *x.shape[1:], chosen.shape[1], experts.down
    within, out, inputs = x.new_empty(chosen.numel(), size), torch.empty_like(x), experts.router.weighs_inputs
    steps, down_steps = _steps(experts.gate or experts.up, experts.stride), _steps(down, hidden)
    (lines, block), (down_lines, down_block) = _tile(size, hidden, 2048, steps), _tile(hidden, size, 1024, down_steps)
    experts_kernel[size // lines, chosen.numel()](
        x, *_Sides.of(experts), chosen, weights if inputs else None, norm.weight, within, experts.stride, norm.epsilon,
        N=size, K=hidden, CHOSEN=count, TURNS=experts.gate_layout == GateLayout.IN_TURNS, BN=lines, BK=block,
        num_warps=4, **_activation(experts), **steps, **overlapping(x),
    )  # fmt: skip
    experts_out_kernel[hidden // down_lines, len(x)](
        within, down.weights, down.bias, chosen, None if inputs else weights, added, out, 1.0, N=hidden, K=size,
        CHOSEN=count, BN=down_lines, BK=down_block, num_warps=4, **down_steps, **overlapping(x),
    )  # fmt: skip
    return out


def _tile(lines: int, columns: int, limit: int, steps: dict[str, Any]) -> tuple[int, int]:
    """Lines of a program, and columns in a turn: lines beside each other are whole sectors of memory."""
    return (lines_of(lines, 16), 256) if steps["LINE"] == 1 else (lines_of(lines), column_block(columns, limit))


class Pairs(NamedTuple):
    """Blocks of `together` pairs [n], of a row and one of its experts; see `grouped_kernel`."""

    order: Tensor
    starts: Tensor | None
    together: int
    blocks: int
    experts: int
    chosen: int

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of the kernels that take a block."""
        count = self.experts
        return {"E": count, "EP": triton.next_power_of_2(count), "BM": self.together, **overlapping(self.order)}


def grouped(chosen: Tensor, experts: int, alone: bool) -> Pairs:
    """The pairs of rows and their experts [rows, n] int32, sorted by expert or each alone."""
    pairs, each = chosen.numel(), chosen.shape[1]
    if alone:
        return Pairs(chosen, None, 16, pairs, experts, each)
    order, starts = torch.empty_like(chosen), chosen.new_empty(experts + 1)
    sort_kernel[(experts + 1,)](chosen, order, starts, pairs, BP=_SORTED, **overlapping(chosen))
    together = 16 if pairs <= 16 * experts else 64
    return Pairs(order, starts, together, min(pairs, pairs // together + experts), experts, each)


def _of_many_rows(experts: Experts, x: Tensor, _: Norm, pairs: Pairs, weights: Tensor | None) -> Tensor:
    """[pairs, hidden], from dense matrices; `weights` are those of what goes into them."""
    size, hidden, count, down = experts.inner_size, experts.hidden, pairs.order.numel(), experts.down
    within, out = x.new_empty(count, size), x.new_empty(count, hidden)
    settings = {**pairs.settings, "BN": _LINES, "BK": 128 // x.element_size(), "PRECISION": _precision(x)}
    settings |= {"num_warps": 4, "num_stages": 3}
    grouped_kernel[pairs.blocks, triton.cdiv(size, _LINES)](
        x, *_Sides.of(experts), weights, pairs.order, pairs.starts, within, experts.stride, N=size, K=hidden,
        CHOSEN=pairs.chosen, TURNS=experts.gate_layout == GateLayout.IN_TURNS, **_activation(experts),
        **_steps(experts.gate or experts.up, experts.stride), **settings,
    )  # fmt: skip
    grouped_kernel[pairs.blocks, triton.cdiv(hidden, _LINES)](
        within, None, down.weights, None, down.bias, None, pairs.order, pairs.starts, out, hidden, N=hidden, K=size,
        CHOSEN=1, TURNS=False, **_NO_ACTIVATION, **_steps(down, hidden), **settings,
    )  # fmt: skip
    return out


def _of_blocks(experts: Experts, x: Tensor, norm: Norm, pairs: Pairs, _: Tensor | None) -> Tensor:
    """[pairs, hidden], from matrices in blocks."""
    first = [experts.gate, experts.up] if experts.gate else [experts.up]
    within = multiply_experts(first, x, pairs, pairs.chosen, norm, _activation(experts))
    return multiply_experts([experts.down], within, pairs)


def multiply_experts(
    matrices: Sequence[Any], x: Tensor, pairs: Pairs, chosen: int = 1, norm: Norm = NO_NORM,
    activation: dict[str, Any] = _NO_ACTIVATION,
) -> Tensor:  # fmt: skip
    """[pairs, lines] products of rows [*, K] with a `BlockMatrix` of all experts, or with gates and another one.

    `chosen` pairs have the same row.
    """
    gate, matrix = matrices[0] if len(matrices) > 1 else None, matrices[-1]
    lines, columns, kind = matrix.rows // pairs.experts, matrix.columns, (gate or matrix).type
    out = x.new_empty(pairs.order.numel(), lines)
    grouped_blocks_kernel[pairs.blocks, triton.cdiv(lines, _BLOCK_LINES)](
        x, *(gate.planes if gate else [None] * 3), *matrix.planes, norm.weight, pairs.order, pairs.starts, out,
        norm.epsilon, offset_bits(kind), offset_bits(matrix.type), N=lines, K=columns, CHOSEN=chosen,
        GATE_TYPE=int(kind), TYPE=int(matrix.type), BN=_BLOCK_LINES, J=_BLOCK_GROUPS, PRECISION=_precision(x),
        num_warps=4, num_stages=2, **activation, **pairs.settings,
    )  # fmt: skip
    return out


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def weighted_sum(parts: Tensor, count: int, weights: Tensor | None, added: Tensor | None = None) -> Tensor:
    """[rows, hidden] of products [rows count, hidden], times weights [rows, count] if there are; and `added` to it."""
    rows, hidden = len(parts) // count, parts.shape[1]
    out = parts.new_empty(rows, hidden)
    sum_kernel[rows, triton.cdiv(hidden, GATE_COLUMNS)](
        parts, weights, added, out, N=hidden, CHOSEN=count, BN=GATE_COLUMNS, **overlapping(parts)
    )
    return out
