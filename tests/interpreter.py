"""A plain interpreter of a model's description, to compare with the model itself."""

import copy
import math
from typing import Any

import torch
from torch import Tensor

from h2o_stream.native import abi
from h2o_stream.native.describe import describe
from h2o_stream.native.description import Attention, Description, Layer, Matrix, Mlp, Norm, Rope
from h2o_stream.native.experts import Experts, Router
from h2o_stream.native.modules import apply_norm
from tests.packed_tiles import numbers as packed_numbers

TOKENS = [1, 17, 4, 60, 33, 33, 9, 21]


def numbers(matrix: Matrix) -> Tensor:
    if matrix.kind in (abi.MatrixKind.FLOAT32, abi.MatrixKind.BFLOAT16):
        return matrix.weights.double()
    return packed_numbers(matrix.weights, matrix.kind, matrix.rows, matrix.columns)


def apply(matrix: Matrix, x: Tensor) -> Tensor:
    y = x @ numbers(matrix).T
    return y if matrix.bias is None else y + matrix.bias.double()


def heads_of(x: Tensor, first: int, step: int, count: int, size: int) -> Tensor:
    return torch.stack([x[:, first + h * step : first + h * step + size] for h in range(count)])


def rotated(x: Tensor, rope: Rope | None) -> Tensor:
    """Rotate x [heads, tokens, D], token n at position n, and put its elements in the order of the rotation."""
    if rope is None:
        return x
    half, rotary = rope.rotary_dims // 2, rope.rotary_dims
    x = x if rope.order is None else x[..., rope.order.long()]
    angles = torch.arange(x.shape[1]).double()[:, None] * rope.frequencies.double()
    first, second, rest = x[..., :half] * rope.scale, x[..., half:rotary] * rope.scale, x[..., rotary:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def normed_and_rotated(attention: Attention, norm: Norm, x: Tensor) -> Tensor:
    """Prepare the queries or keys x [heads, tokens, D]."""
    if attention.norms_after_rope:
        in_order, rope = rotated(x, attention.rope), attention.rope
        back = slice(None) if rope is None or rope.order is None else rope.order.long().argsort()
        return apply_norm(norm, in_order[..., back])
    if attention.norms_all_heads:
        whole = x.transpose(0, 1)
        return rotated(apply_norm(norm, whole.flatten(1)).view(whole.shape).transpose(0, 1), attention.rope)
    return rotated(apply_norm(norm, x), attention.rope)


def attend(attention: Attention, x: Tensor) -> Tensor:
    qkv = torch.cat([apply(matrix, x) for matrix in attention.qkv], -1)
    at, size = attention.heads, attention.head_size
    query = heads_of(qkv, at.query_offset, at.query_stride, attention.query_heads, size)
    key = heads_of(qkv, at.key_offset, at.key_stride, attention.kv_heads, size)
    value = heads_of(qkv, at.value_offset, at.value_stride, attention.kv_heads, attention.value_size)
    query = normed_and_rotated(attention, attention.query_norm, query)
    key = normed_and_rotated(attention, attention.key_norm, key)
    groups = attention.query_heads // attention.kv_heads
    scores = query @ key.repeat_interleave(groups, 0).mT * attention.scaling
    if attention.softcap:
        scores = (scores / attention.softcap).tanh() * attention.softcap
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, -math.inf)
    if attention.sink_logits is not None:
        sinks = attention.sink_logits.detach().double().view(-1, 1, 1)
        scores = torch.cat((scores, sinks.expand(-1, scores.shape[1], 1)), -1)
    weights = scores.softmax(-1)[..., : scores.shape[1]]
    return apply(attention.out, (weights @ value.repeat_interleave(groups, 0)).transpose(0, 1).flatten(1))


def apply_mlp(mlp: Mlp, x: Tensor) -> Tensor:
    activate = ACTIVATIONS[mlp.activation]
    if mlp.gate is None:
        return apply(mlp.down, activate(apply(mlp.up, x)))
    return apply(mlp.down, activate(apply(mlp.gate, x)) * apply(mlp.up, x))


def weights_of(router: Router, x: Tensor) -> Tensor:
    """The weights of all experts for a token x [hidden]; zero for those it does not go through."""
    logits = apply(router.matrix, x)
    scores = logits.sigmoid() if router.scoring == abi.Scoring.SIGMOID else logits.softmax(-1)
    worths = scores if router.choice_bias is None else scores + router.choice_bias
    weights = torch.zeros_like(scores)
    for expert in sorted(range(len(scores)), key=lambda expert: -float(worths[expert]))[: router.chosen]:
        weights[expert] = scores[expert]
    return weights * router.scale / (weights.sum() if router.normalized else 1.0)


def apply_experts(experts: Experts, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for token, weights in enumerate(weights_of(experts.router, row) for row in x):
        for expert, weight in enumerate(weights):
            y[token] += weight * apply_mlp(experts.expert(expert), x[token])
    if experts.shared:
        factor = apply(experts.shared_gate, x).sigmoid() if experts.shared_gate else 1.0
        y += factor * apply_mlp(experts.shared, x)
    return y


def feed_forward(layer: Layer, x: Tensor) -> Tensor:
    return apply_experts(layer.mlp, x) if isinstance(layer.mlp, Experts) else apply_mlp(layer.mlp, x)


def interpret(description: Description, tokens: list[int]) -> Tensor:
    """Logits [n, vocabulary] in float64, with full attention at absolute positions."""
    x = numbers(description.embedding)[tokens] * description.embedding_scale
    if description.learned_positions is not None:
        start = description.learned_offset
        x = x + description.learned_positions[start : start + len(tokens)]
    x = apply_norm(description.embedding_norm, x)
    for layer in description.layers:
        added = apply_norm(layer.after_attention, attend(layer.attention, apply_norm(layer.before_attention, x)))
        before, x = x, x + description.residual_scale * added
        read = before if layer.parallel else x
        x = x + description.residual_scale * apply_norm(
            layer.after_mlp, feed_forward(layer, apply_norm(layer.before_mlp, read))
        )
    logits = apply(description.output, apply_norm(description.norm, x)) * description.logit_scale
    cap = description.logit_softcap
    return (logits / cap).tanh() * cap if cap else logits


@torch.no_grad()
def error(model: Any) -> float:
    """The largest difference between the interpreter's and the model's logits, relative to the largest logit."""
    expected = model(torch.tensor([TOKENS])).logits[0].double()
    return float((interpret(describe(model), TOKENS) - expected).abs().max() / expected.abs().max())


def nudged(model: Any) -> Any:
    """A copy whose norms and biases differ from one and zero, as in trained models."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model
