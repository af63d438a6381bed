"""Mixtures of experts on a GPU, under Triton's interpreter. `tests/test_gpu.py` runs them."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_stream.gpu import available
from h2o_stream.native.abi import Activation, MatrixKind, NormKind, Scoring
from h2o_stream.native.description import Mlp
from h2o_stream.native.experts import Experts, Router
from h2o_stream.native.matrix import NO_NORM, Matrix, Norm
from tests.test_gpu_graphs import HostFree
from tests.tolerance import relative_error

pytestmark = pytest.mark.skipif(os.environ.get(available.INTERPRET) != "1", reason="Triton does not interpret kernels")

HIDDEN, INNER, COUNT = 36, 8, 5


def matrix(rows: int, columns: int) -> Matrix:
    return Matrix(torch.randn(rows, columns) / 6, None, rows, columns, MatrixKind.FLOAT32)


def made(scoring: Scoring, normalized: bool, chosen: int, gated: bool, shared: bool, count: int = COUNT) -> Experts:
    torch.manual_seed(0)
    bias, factors = (torch.rand(count), torch.rand(count)) if scoring == Scoring.SIGMOID else (None, None)
    router = Router(matrix(count, HIDDEN), chosen, scoring, normalized, 1.5, bias, factors=factors)
    both = matrix(count * 2 * INNER, HIDDEN)
    rows = (count * 2 - 1) * INNER
    gate, up = both.row_range(0, rows), both.row_range(INNER, rows)
    other = Mlp(matrix(INNER, HIDDEN), matrix(INNER, HIDDEN), matrix(HIDDEN, INNER), Activation.SILU)
    return Experts(
        router, gate if gated else None, up, matrix(count * HIDDEN, INNER), INNER, 2 * INNER, Activation.SILU,
        shared=other if shared else None, shared_gate=matrix(1, HIDDEN) if shared else None,
    )  # fmt: skip


def of_mlp(mlp: Mlp, x: Tensor) -> Tensor:
    gate, up, down = (m.weights.double() if m else None for m in (mlp.gate, mlp.up, mlp.down))
    silu = torch.nn.functional.silu
    return (silu(x @ up.T) if gate is None else silu(x @ gate.T) * (x @ up.T)) @ down.T


def expected(experts: Experts, x: Tensor) -> Tensor:
    router = experts.router
    logits = x @ router.matrix.weights.double().T
    scores = logits.sigmoid() if router.scoring == Scoring.SIGMOID else logits.softmax(1)
    out = torch.zeros_like(x)
    for row, (v, score) in enumerate(zip(x, scores, strict=True)):
        worth = score if router.choice_bias is None else score + router.choice_bias
        best = worth.topk(router.chosen).indices.tolist()
        total = score[best].sum() if router.normalized else 1.0
        for expert in best:
            factor = 1.0 if router.factors is None else router.factors[expert]
            out[row] += of_mlp(experts.expert(expert), v) * score[expert] * router.scale / total * factor
    if experts.shared:
        out += of_mlp(experts.shared, x) * (x @ experts.shared_gate.weights.double().T).sigmoid()
    return out


@pytest.mark.parametrize("rows", [1, 4, 5, 90])
@pytest.mark.parametrize("settings", [
    (Scoring.SOFTMAX, False, 2, True, True), (Scoring.SOFTMAX, True, 5, False, False),
    (Scoring.SIGMOID, True, 1, True, False), (Scoring.SIGMOID, False, 3, True, True, 1 << 5),
], ids=["shared", "all", "one", "many"])  # fmt: skip
def test_rows_and_their_experts(rows: int, settings: Any) -> None:
    """With nothing that depends on data on the host; few rows are those of each alone, bit for bit."""
    from h2o_stream.gpu.mlps import mixed
    from h2o_stream.gpu.packed import FEW

    experts, x = made(*settings), torch.randn(rows, HIDDEN)
    weight = torch.rand(HIDDEN) + 0.5
    inputs = torch.nn.functional.rms_norm(x.double(), (HIDDEN,), weight.double(), 1e-6)
    with HostFree() as mode:
        if rows <= FEW:
            norm = Norm(NormKind.RMS, weight, None, 1e-6)
            ours = mixed(experts, x, norm)
        else:
            ours = mixed(experts, inputs.float(), NO_NORM)
    assert mode.calls
    assert relative_error(ours.double(), expected(experts, inputs)) < 1e-5
    if rows == FEW:
        assert ours.equal(torch.cat([mixed(experts, row, norm) for row in x.split(1)]))
