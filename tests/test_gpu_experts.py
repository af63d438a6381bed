"""Mixtures of experts on a GPU, under Triton's interpreter. `tests/test_gpu.py` runs them."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_stream.attachment.describe import describe
from h2o_stream.config import ModelConfig
from h2o_stream.gpu import available
from h2o_stream.loading.hf_weights import HfWeights
from h2o_stream.native.abi import Activation, GateLayout, GroupWorth, MatrixKind, NormKind, Scoring
from h2o_stream.native.description import Mlp
from h2o_stream.native.experts import Experts, Router
from h2o_stream.native.gguf_types import TensorType
from h2o_stream.native.matrix import NO_NORM, Matrix, Norm
from tests.family_models import TEXT, written
from tests.test_gpu_blocks import load_to_gpu, random_blocks
from tests.test_gpu_graphs import HostFree
from tests.tolerance import relative_error

pytestmark = pytest.mark.skipif(os.environ.get(available.INTERPRET) != "1", reason="Triton does not interpret kernels")


def matrix(rows: int, columns: int) -> Matrix:
    return Matrix(torch.randn(rows, columns) / 6, None, rows, columns, MatrixKind.FLOAT32)


def made(
    scoring: Scoring, normalized: bool, chosen: int, gated: bool, shared: bool, count: int = 5, hidden: int = 36,
    inner: int = 8,
) -> Experts:  # fmt: skip
    torch.manual_seed(0)
    bias, factors = (torch.rand(count), torch.rand(count)) if scoring == Scoring.SIGMOID else (None, None)
    router = Router(matrix(count, hidden), chosen, scoring, normalized, 1.5, bias, factors=factors)
    both = matrix(count * 2 * inner, hidden)
    rows = (count * 2 - 1) * inner
    gate, up = both.row_range(0, rows), both.row_range(inner, rows)
    other = Mlp(matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner), Activation.SILU)
    return Experts(
        router, gate if gated else None, up, matrix(count * hidden, inner), inner, 2 * inner, Activation.SILU,
        shared=other if shared else None, shared_gate=matrix(1, hidden) if shared else None,
    )  # fmt: skip


def product(matrix: Matrix, x: Tensor) -> Tensor:
    y = x @ matrix.weights.double().T
    return y if matrix.bias is None else y + matrix.bias


def of_mlp(mlp: Mlp, x: Tensor, weight: float | Tensor = 1.0) -> Tensor:
    gate, up = (product(m, x) * weight if m else None for m in (mlp.gate, mlp.up))
    if mlp.activation == Activation.CLAMPED_SWIGLU:
        slope, limit, offset = mlp.parameters
        gate = gate.clamp(max=limit)
        return product(mlp.down, gate * (slope * gate).sigmoid() * (up.clamp(-limit, limit) + offset))
    silu = torch.nn.functional.silu
    return product(mlp.down, silu(up) if gate is None else silu(gate) * up)


def expected(experts: Experts, x: Tensor) -> Tensor:
    router = experts.router
    logits = x @ router.matrix.weights.double().T
    scores = logits.sigmoid() if router.scoring == Scoring.SIGMOID else logits.softmax(1)
    out = torch.zeros_like(x)
    for row, (v, score) in enumerate(zip(x, scores, strict=True)):
        worth = score if router.choice_bias is None else score + router.choice_bias
        if router.groups:
            groups = worth.view(router.groups, -1)
            of_groups = groups.topk(1 + (router.group_worth == GroupWorth.BEST_TWO)).values.sum(1)
            dropped = of_groups.topk(router.groups - router.chosen_groups, largest=False).indices
            worth = groups.index_fill(0, dropped, -torch.inf).flatten()
        best = worth.topk(router.chosen).indices.tolist()
        total = score[best].sum() if router.normalized else 1.0
        for expert in best:
            factor = 1.0 if router.factors is None else router.factors[expert]
            weight = score[expert] * router.scale / total * factor
            of_inputs, of_outputs = (weight, 1.0) if router.weighs_inputs else (1.0, weight)
            out[row] += of_mlp(experts.expert(expert), v, of_inputs) * of_outputs
    if experts.shared:
        out += of_mlp(experts.shared, x) * (x @ experts.shared_gate.weights.double().T).sigmoid()
    return out


@pytest.mark.parametrize("rows", [1, 4, 5, 90])
@pytest.mark.parametrize("settings", [
    (Scoring.SOFTMAX, False, 2, True, True), (Scoring.SOFTMAX, True, 5, False, False),
    (Scoring.SIGMOID, True, 1, True, False), (Scoring.SIGMOID, False, 3, True, True, 1 << 5),
], ids=["shared", "all", "one", "many"])  # fmt: skip
def test_rows_and_their_experts(rows: int, settings: Any) -> None:
    experts = made(*settings)
    check(experts, experts, rows, 1e-5)


@pytest.mark.parametrize("worth", [*GroupWorth])
def test_groups_of_experts(worth: GroupWorth) -> None:
    """Of which only some are chosen from."""
    torch.manual_seed(0)
    plain = made(Scoring.SIGMOID, True, 3, True, False, count=12)
    router = replace(plain.router, groups=4, chosen_groups=2, group_worth=worth)
    check(replace(plain, router=router), replace(plain, router=router), 5, 1e-5)


@pytest.mark.parametrize("layout", [*GateLayout])
@pytest.mark.parametrize("rows", [1, 4, 5, 90])
def test_matrices_as_they_are_stored(rows: int, layout: GateLayout) -> None:
    """Columns after columns, gates in turns or before the others, with biases; weights of inputs, without them."""
    torch.manual_seed(0)
    count, hidden, inner, weighs = 5, 36, 8, layout == GateLayout.HALVES
    plain = made(Scoring.SOFTMAX, True, 2, True, False, count, hidden, inner)
    swiglu = {"activation": Activation.CLAMPED_SWIGLU, "parameters": (1.7, 0.5, 1.0)}
    biased = {
        name: replace(part, bias=None if weighs else torch.randn(part.rows))
        for name, part in (("gate", matrix(count * inner, hidden)), ("up", matrix(count * inner, hidden)),
                           ("down", plain.down))
    }  # fmt: skip
    plain = replace(plain, router=replace(plain.router, weighs_inputs=weighs), stride=inner, **biased, **swiglu)
    if layout == GateLayout.APART:
        check(plain, plain, rows, 1e-5)
        return

    def joined(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts, 2).flatten(1, 2) if layout == GateLayout.IN_TURNS else torch.cat(parts, 1)

    def in_columns(parts: list[Matrix], size: int) -> Matrix:
        weights = joined([part.weights.view(count, size, -1) for part in parts])
        bias = None if weighs else joined([part.bias.view(count, size, 1) for part in parts]).flatten()
        weights = weights.transpose(1, 2).contiguous()
        lines, columns = count * weights.shape[2], weights.shape[1]
        return Matrix(weights.view(lines, columns), bias, lines, columns, MatrixKind.FLOAT32_COLUMNS)

    both, down = in_columns([plain.gate, plain.up], inner), in_columns([plain.down], hidden)
    check(replace(plain, gate=both, up=None, down=down, stride=2 * inner, gate_layout=layout), plain, rows, 1e-5)


@pytest.mark.parametrize(("rows", "types"), [
    (1, ("Q8_0", "Q8_0", "Q4_0")), (4, ("Q4_1", "Q4_1", "Q5_0")), (5, (None, "Q4_K", "Q6_K")), (60, ("Q8_0",) * 3),
])  # fmt: skip
def test_experts_in_blocks(rows: int, types: Sequence[str | None]) -> None:
    """As of a GGUF file; of gates, what they are for, and the last matrices."""
    from h2o_stream.gpu.packed import block_matrix, repacked

    size = 256 if "Q6_K" in types else 64
    experts = made(Scoring.SOFTMAX, True, 2, True, False, count=3, hidden=size, inner=size)

    def packed(name: str | None) -> Any:
        if name is None:
            return None
        blocks = repacked(random_blocks(name, 3 * size, size), TensorType[name], torch.device("cpu"))
        return block_matrix(blocks, None, TensorType[name], 3 * size, size)

    def dense(matrix: Any) -> Matrix | None:
        kind = MatrixKind.FLOAT32
        return matrix and Matrix(matrix.unpacked(torch.float32), None, matrix.rows, matrix.columns, kind)

    matrices = dict(zip(("gate", "up", "down"), map(packed, types), strict=True))
    experts = replace(experts, stride=size, **matrices)
    check(experts, replace(experts, **{name: dense(x) for name, x in matrices.items()}), rows, 1e-4)


@torch.no_grad()
def test_a_file_whose_experts_stay_in_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from h2o_stream.gpu import layers, mlps

    config = ModelConfig(str(written(tmp_path, "Qwen 3 MoE")), device="cpu", dtype="float32")
    kept, dense = (load_to_gpu(monkeypatch, replace(config, quantize=quantize)) for quantize in ("auto", "none"))
    assert not [weight for weight in kept.parameters() if weight.ndim > 2]
    ids = torch.tensor([TEXT[:9]])
    assert relative_error(kept(ids).logits, dense(ids).logits) < 1e-4
    description, x = describe(kept), torch.randn(5, kept.config.hidden_size)
    assert not layers.why_not(description)
    ours = mlps.mixed(description.layers[1].mlp, x, NO_NORM)
    assert relative_error(ours, dense.model.layers[1].mlp(x[None])[0]) < 1e-4
    blocks = HfWeights.blocks
    monkeypatch.setattr(HfWeights, "blocks", lambda self, name: None if "gate_proj" in name else blocks(self, name))
    assert load_to_gpu(monkeypatch, config)(ids).logits.equal(dense(ids).logits)


def check(experts: Experts, dense: Experts, rows: int, rounding: float) -> None:
    """With nothing that depends on data on the host; few rows are those of each alone, bit for bit."""
    from h2o_stream.gpu import mlps
    from h2o_stream.gpu.packed import FEW

    assert not mlps.why_not(experts)
    x, weight = torch.randn(rows, experts.hidden), torch.rand(experts.hidden) + 0.5
    inputs = torch.nn.functional.rms_norm(x.double(), (experts.hidden,), weight.double(), 1e-6)
    norm = Norm(NormKind.RMS, weight, None, 1e-6) if rows <= FEW else NO_NORM
    with HostFree() as mode:
        ours = mlps.mixed(experts, x if norm.kind else inputs.float(), norm)
    assert mode.calls
    assert relative_error(ours.double(), expected(dense, inputs)) < rounding
    if rows == FEW:
        assert ours.equal(torch.cat([mlps.mixed(experts, row, norm) for row in x.split(1)]))
