"""What follows attention in a layer: MLPs, and mixtures of experts.

With n experts for a token, a step of R rows reads the matrices of R n experts if R is at most `FEW`, and else those of
each chosen expert once for every 16 or 64 pairs: of 128 experts, 8 for a token, 32 rows choose about 112, not 256.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from h2o_stream.gpu.experts import experts_kernel, experts_out_kernel, grouped_kernel, route_kernel, sort_kernel
from h2o_stream.gpu.matrices import GATE_COLUMNS, column_block, gemv, lines_of, multiply, overlapping
from h2o_stream.gpu.packed import FEW
from h2o_stream.gpu.products import gate_kernel
from h2o_stream.native.abi import Activation, GateLayout, MatrixKind, Scoring
from h2o_stream.native.description import Mlp, Norm
from h2o_stream.native.experts import Experts

DENSE = {MatrixKind.FLOAT32, MatrixKind.BFLOAT16}

_LINES, _SORTED = 64, 1024
"""Lines of a program of `grouped_kernel`, and pairs that one of `sort_kernel` looks at in a turn."""


def why_not(mlp: Any) -> str:
    """Why these kernels do not compute an MLP or experts, or nothing."""
    return _why_not_experts(mlp) if isinstance(mlp, Experts) else _why_not_mlp(mlp)


def _why_not_mlp(mlp: Any) -> str:
    if mlp.inner_norm.kind or mlp.gate_deviations is not None or mlp.activation > Activation.RELU_SQUARED:
        return "its MLP is special"
    return ""


def _why_not_experts(experts: Experts) -> str:
    router = experts.router
    special = router.groups or router.scoring == Scoring.SPARSE_MIXER or router.weighs_inputs or experts.beside
    if special or experts.up is None or experts.gate_layout != GateLayout.APART:
        return "its experts are special"
    plain = [matrix for matrix in (experts.gate, experts.up, experts.down) if matrix]
    if any(matrix.bias is not None or matrix.scale != 1 or matrix.kind not in DENSE for matrix in plain):
        return "its experts have biases, or are scaled or packed"
    return _why_not_mlp(experts.shared) if experts.shared else ""


def inner(mlp: Mlp, x: Tensor, norm: Norm) -> Tensor:
    """[rows, inner], what the last matrix of an MLP is multiplied with."""
    activation = int(mlp.activation)
    if len(x) <= FEW:
        matrices = [mlp.gate, mlp.up] if mlp.gate else [mlp.up]
        return gemv(matrices, x, norm, gated=mlp.gate is not None, activation=activation)
    gate, up = (multiply([matrix], x) if matrix else None for matrix in (mlp.gate, mlp.up))
    if gate is None:
        gate, up = up, None
    assert gate is not None
    rows, size = gate.shape
    gate_kernel[rows, triton.cdiv(size, GATE_COLUMNS)](
        gate, up, gate, size, ACTIVATION=activation, BN=GATE_COLUMNS, **overlapping(x)
    )
    return gate


def mixed(experts: Experts, x: Tensor, norm: Norm) -> Tensor:
    """[rows, hidden], what the experts of each row give, and the shared one."""
    router, count = experts.router, experts.router.chosen
    logits = multiply([router.matrix], x if len(x) <= FEW else x.float(), norm, dtype=torch.float32)
    chosen = torch.empty(len(x), count, dtype=torch.int32, device=x.device)
    weights = torch.empty(len(x), count, dtype=torch.float32, device=x.device)
    route_kernel[(len(x),)](
        logits, router.choice_bias, router.factors, chosen, weights, router.scale, E=experts.count, CHOSEN=count,
        EP=triton.next_power_of_2(experts.count), SIGMOID=router.scoring == Scoring.SIGMOID,
        NORMALIZED=router.normalized, **overlapping(x),
    )  # fmt: skip
    added = None
    if experts.shared:
        added = multiply([experts.shared.down], inner(experts.shared, x, norm))
        if experts.shared_gate:
            added *= multiply([experts.shared_gate], x, norm, dtype=torch.float32).sigmoid()
    if len(x) <= FEW:
        return _of_few_rows(experts, x, norm, chosen, weights, added)
    products = _grouped(experts, x, chosen, weights).sum(1)
    return products if added is None else products.add_(added)


def _of_few_rows(
    experts: Experts, x: Tensor, norm: Norm, chosen: Tensor, weights: Tensor, added: Tensor | None
) -> Tensor:
    assert experts.up is not None
    gate, size, hidden, count = experts.gate and experts.gate.weights, experts.inner_size, *x.shape[1:], chosen.shape[1]
    within, out = x.new_empty(chosen.numel(), size), torch.empty_like(x)
    experts_kernel[size // lines_of(size), chosen.numel()](
        x, gate, experts.up.weights, chosen, norm.weight, within, experts.stride, norm.epsilon, N=size, K=hidden,
        CHOSEN=count, ACTIVATION=int(experts.activation), BN=lines_of(size), BK=column_block(hidden, 2048), num_warps=4,
        **overlapping(x),
    )  # fmt: skip
    experts_out_kernel[hidden // lines_of(hidden), len(x)](
        within, experts.down.weights, chosen, weights, added, out, 1.0, N=hidden, K=size, CHOSEN=count,
        BN=lines_of(hidden), BK=column_block(size, 1024), num_warps=4, **overlapping(x),
    )  # fmt: skip
    return out


def _grouped(experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """[rows, chosen, hidden], times the weights."""
    assert experts.up is not None
    pairs, count, size, hidden = chosen.numel(), experts.count, experts.inner_size, experts.hidden
    order, starts = torch.empty_like(chosen), chosen.new_empty(count + 1)
    sort_kernel[(count + 1,)](chosen, order, starts, pairs, BP=_SORTED, **overlapping(x))
    together = 16 if pairs <= 16 * count else 64
    programs = min(pairs, pairs // together + count)
    within, out = x.new_empty(pairs, size), x.new_empty(*chosen.shape, hidden)
    shape = {
        "E": count, "EP": triton.next_power_of_2(count), "BM": together, "BN": _LINES, "BK": 128 // x.element_size(),
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32", "num_warps": 4, "num_stages": 3, **overlapping(x),
    }  # fmt: skip
    grouped_kernel[programs, triton.cdiv(size, _LINES)](
        x, experts.gate and experts.gate.weights, experts.up.weights, order, starts, None, within, experts.stride,
        N=size, K=hidden, CHOSEN=chosen.shape[1], ACTIVATION=int(experts.activation), **shape,
    )  # fmt: skip
    grouped_kernel[programs, triton.cdiv(hidden, _LINES)](
        within, None, experts.down.weights, order, starts, weights, out, hidden, N=hidden, K=size, CHOSEN=1,
        ACTIVATION=-1, **shape,
    )  # fmt: skip
    return out
