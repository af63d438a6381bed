"""A plain interpreter of a model's description, to compare with the model itself."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from h2o_stream.attachment.describe import describe
from h2o_stream.native import abi
from h2o_stream.native.abi import Activation, NormKind
from h2o_stream.native.altup import AltUp, Laurel, Versions
from h2o_stream.native.attention import Attention, Rope
from h2o_stream.native.description import Description, Layer, Matrix, Mlp, Norm
from h2o_stream.native.experts import Experts, Router
from tests.mixers import MIXERS
from tests.packed_tiles import numbers as packed_numbers

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: functional.silu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.GELU_ERF: functional.gelu,
    Activation.RELU: functional.relu,
    Activation.RELU_SQUARED: lambda x: functional.relu(x).square(),
}

TOKENS = [1, 17, 4, 60, 33, 33, 9, 21]


def apply_norm(norm: Norm, x: Tensor) -> Tensor:
    """Apply a norm to vectors [..., n]."""
    if norm.kind == NormKind.NONE:
        return x
    assert norm.weight is not None
    centered = x - x.mean(-1, keepdim=True) if norm.kind == NormKind.LAYER else x
    y = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + norm.epsilon) * norm.weight
    shifted: Tensor = y if norm.bias is None else y + norm.bias
    return shifted


def xielu(parameters: Sequence[float], x: Tensor) -> Tensor:
    """XIELU with the parameters that `Activation` in `abi.h` lists."""
    positive, negative, slope, limit = parameters
    below = (torch.expm1(x.clamp_max(limit)) - x) * negative
    return torch.where(x > 0, positive * x * x, below) + slope * x


def gated(activation: Activation, parameters: Sequence[float], gate: Tensor, up: Tensor) -> Tensor:
    """The input of an MLP's `down`."""
    if activation == Activation.CLAMPED_SWIGLU:
        slope, limit, offset = parameters
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
        return gate * (gate * slope).sigmoid() * (up + offset)
    return (xielu(parameters, gate) if activation == Activation.XIELU else ACTIVATIONS[activation](gate)) * up


def numbers(matrix: Matrix) -> Tensor:
    if matrix.kind in (abi.MatrixKind.FLOAT32, abi.MatrixKind.BFLOAT16):
        return matrix.weights.double()
    return packed_numbers(matrix.weights, matrix.kind, matrix.rows, matrix.columns)


def apply(matrix: Matrix, x: Tensor) -> Tensor:
    y = x @ numbers(matrix).T
    return matrix.scale * (y if matrix.bias is None else y + matrix.bias.double())


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
    x = x if attention.elements is None else x[..., attention.elements.long()]
    if attention.norms_after_rope:
        in_order, rope = rotated(x, attention.rope), attention.rope
        back = slice(None) if rope is None or rope.order is None else rope.order.long().argsort()
        return apply_norm(norm, in_order[..., back])
    if attention.norms_all_heads:
        whole = x.transpose(0, 1)
        return rotated(apply_norm(norm, whole.flatten(1)).view(whole.shape).transpose(0, 1), attention.rope)
    return rotated(apply_norm(norm, x), attention.rope)


def projected(attention: Attention, x: Tensor, lent: Tensor) -> Tensor:
    """The vectors [tokens, n] that queries, keys and values are in; `lent` are those of the layer before."""
    outputs = [apply(matrix, x) for matrix in attention.qkv]
    starts = attention.columns or [sum(matrix.rows for matrix in attention.qkv[:i]) for i in range(len(outputs))]
    ends = [start + y.shape[1] for start, y in zip(starts, outputs, strict=True)]
    size = max(*ends, *(latent.end + latent.matrix.rows for latent in attention.latent), lent.shape[1])
    vector = torch.cat((lent, lent.new_zeros(len(x), size - lent.shape[1])), 1)
    for start, end, y in zip(starts, ends, outputs, strict=True):
        vector[:, start:end] = y.clamp(-attention.clip, attention.clip) if attention.clip else y
    for latent in attention.latent:
        part = apply_norm(latent.norm, vector[:, latent.start : latent.start + latent.matrix.columns])
        vector[:, latent.end : latent.end + latent.matrix.rows] = apply(latent.matrix, part)
    return vector


def gated_output(attention: Attention, vector: Tensor, attended: Tensor) -> Tensor:
    """The attention's output [tokens, heads * value_size] behind its gate and norm."""
    if gate := attention.gate:
        values = heads_of(vector, gate.offset, gate.stride, attention.query_heads, gate.size).transpose(0, 1)
        factors = values.sigmoid() if gate.kind == abi.GateKind.SIGMOID_GATE else functional.softplus(values)
        attended = (attended.unflatten(1, (attention.query_heads, -1)) * factors).flatten(1)
    return apply_norm(attention.output_norm, attended)


def attend(attention: Attention, x: Tensor, lent: Tensor) -> tuple[Tensor, Tensor]:
    """What an attention gives, and the vectors of its queries, keys and values."""
    vector = projected(attention, x, lent)
    at, size, tail = attention.heads, attention.head_size, attention.key_tail
    query = heads_of(vector, at.query_offset, at.query_stride, attention.query_heads, size)
    key = heads_of(vector, at.key_offset, at.key_stride, attention.kv_heads, size)
    if tail:
        key[..., -tail.size :] = vector[:, tail.offset : tail.offset + tail.size]
    value = heads_of(vector, at.value_offset, at.value_stride, attention.kv_heads, attention.value_size)
    value = apply_norm(attention.value_norm, value) * attention.value_scale
    query = normed_and_rotated(attention, attention.query_norm, query)
    if heat := attention.temperature:
        pieces = ((torch.arange(len(x)).double() + heat.start) / heat.length).floor()
        query = query * (1 + heat.scale * torch.log1p(pieces))[:, None]
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
    attended = (weights @ value.repeat_interleave(groups, 0)).transpose(0, 1).flatten(1)
    return apply(attention.out, gated_output(attention, vector, attended)), vector


def apply_mlp(mlp: Mlp, x: Tensor) -> Tensor:
    up = apply(mlp.up, x)
    gate, up = (up, torch.ones_like(up)) if mlp.gate is None else (apply(mlp.gate, x), up)
    if mlp.gate_deviations is not None:
        mean, deviation = gate.mean(-1, keepdim=True), gate.std(-1, keepdim=True, correction=0)
        gate = (gate - mean - mlp.gate_deviations * deviation).clamp_min(0)
    return apply(mlp.down, apply_norm(mlp.inner_norm, gated(mlp.activation, mlp.parameters, gate, up)))


def weights_of(router: Router, x: Tensor) -> Tensor:
    """The weights of all experts for a token x [hidden]; zero for those it does not go through."""
    logits = apply(router.matrix, x)
    weights = torch.zeros_like(logits)
    if router.scoring == abi.Scoring.SPARSE_MIXER:
        left = {expert: float(logit) for expert, logit in enumerate(logits)}
        for _ in range(router.chosen):
            best = max(left, key=lambda expert: left[expert])
            near = [x for x in left.values() if (left[best] - x) / max(abs(x), left[best]) <= 2 * router.jitter]
            weights[best] = 1 / sum(math.exp(x - left[best]) for x in near)
            del left[best]
        return weights * router.scale
    scores = logits.sigmoid() if router.scoring == abi.Scoring.SIGMOID else logits.softmax(-1)
    worths = scores if router.choice_bias is None else scores + router.choice_bias
    groups = worths.view(max(1, router.groups), -1)
    best_of_group = 2 if router.group_worth == abi.GroupWorth.BEST_TWO else 1
    order = sorted(range(len(groups)), key=lambda group: -float(groups[group].sort().values[-best_of_group:].sum()))
    kept = order[: router.chosen_groups] if router.groups else order
    allowed = [expert for expert in range(len(scores)) if expert // groups.shape[1] in kept]
    for expert in sorted(allowed, key=lambda expert: -float(worths[expert]))[: router.chosen]:
        weights[expert] = scores[expert]
    weights = weights * router.scale / (weights.sum() if router.normalized else 1.0)
    return weights if router.factors is None else weights * router.factors.double()


def apply_expert(experts: Experts, index: int, x: Tensor) -> Tensor:
    if experts.gate_layout == abi.GateLayout.APART:
        return apply_mlp(experts.expert(index), x)
    both, down = (part_of(matrix, index, experts.count) for matrix in (experts.gate, experts.down))
    y = both(x)
    gate, up = (y[:, 0::2], y[:, 1::2]) if experts.gate_layout == abi.GateLayout.IN_TURNS else y.chunk(2, 1)
    return down(gated(experts.activation, experts.parameters, gate, up))


def part_of(matrix: Matrix, index: int, count: int) -> Any:
    """One of the stacked matrices, whose columns follow one another."""
    rows = matrix.rows // count
    weights = matrix.weights.double().reshape(count, matrix.columns, rows)[index]
    bias = 0.0 if matrix.bias is None else matrix.bias.double().view(count, rows)[index]
    return lambda x: x @ weights + bias


def apply_experts(experts: Experts, x: Tensor) -> Tensor:
    y, weighed = torch.zeros_like(x), experts.router.weighs_inputs
    read = apply_norm(experts.beside.router, x) if experts.beside else x
    x = apply_norm(experts.beside.inputs, x) if experts.beside else x
    weights = torch.stack([weights_of(experts.router, row) for row in read])
    for expert in weights.any(0).nonzero().flatten().tolist():
        tokens = weights[:, expert].nonzero().flatten()
        weight = weights[tokens, expert, None]
        outputs = apply_expert(experts, expert, x[tokens] * (weight if weighed else 1.0))
        y[tokens] += outputs * (1.0 if weighed else weight)
    if experts.beside:
        return apply_norm(experts.beside.output, y)
    if experts.shared:
        factor = apply(experts.shared_gate, x).sigmoid() if experts.shared_gate else 1.0
        y += factor * apply_mlp(experts.shared, x)
    return y


def feed_forward(layer: Layer, x: Tensor) -> Tensor:
    normed = apply_norm(layer.before_mlp, x)
    if not isinstance(layer.mlp, Experts):
        return apply_mlp(layer.mlp, normed)
    if (beside := layer.mlp.beside) is None:
        return apply_experts(layer.mlp, normed)
    assert layer.mlp.shared is not None
    return apply_norm(beside.mlp, apply_mlp(layer.mlp.shared, normed)) + apply_experts(layer.mlp, x)


def embeddings_of_layers(description: Description, tokens: list[int], x: Tensor) -> Tensor:
    """[tokens, layers, size], for tokens whose embeddings are x."""
    own = description.layer_embeddings
    assert own is not None
    size = len(description.layers), -1
    projection = apply_norm(own.norm, (apply(own.projection, x) * own.projection_scale).unflatten(1, size))
    rows = [token if token < own.embedding.rows else 0 for token in tokens]
    return (numbers(own.embedding)[rows].unflatten(1, size) * own.scale + projection) * own.output_scale


def mixed(layer: Layer, x: Tensor, lent: Tensor) -> tuple[Tensor, Tensor]:
    """What attention and recurrent mixer add to x [n, hidden], before the norm after them; and see `attend`."""
    x, y = apply_norm(layer.before_attention, x), torch.zeros_like(x)
    if layer.attention is not None:
        y, lent = attend(layer.attention, x, lent)
    if layer.mixer is not None:
        projected = torch.cat([apply(matrix, x) for matrix in layer.mixer.projections], -1)
        y = y + apply(layer.mixer.out, MIXERS[type(layer.mixer)](layer.mixer, projected))
    return y, lent


def versions_of(versions: Versions, x: Tensor) -> Tensor:
    """The first versions [n, tokens, hidden] of the residual stream x, all as long as x."""
    return torch.stack((x, *(as_long(apply(matrix, x), x) for matrix in versions.first)))


def merged(versions: Versions, v: Tensor) -> Tensor:
    """What goes into the final norm."""
    others = (as_long(apply(matrix, x), v[0]) for matrix, x in zip(versions.last, v[1:], strict=True))
    return torch.stack((v[0], *others)).mean(0)


def as_long(x: Tensor, other: Tensor) -> Tensor:
    return x * other.square().mean(-1, keepdim=True).sqrt() / x.square().mean(-1, keepdim=True).sqrt()


def routed(altup: AltUp, x: Tensor) -> Tensor:
    return (x / (x.square().mean(-1, keepdim=True) + altup.epsilon).sqrt() @ altup.router.double().T).tanh()


def predicted(altup: AltUp, active: int, v: Tensor) -> Tensor:
    """The versions [n, tokens, hidden] before a layer."""
    count = len(v)
    factors = (routed(altup, v[active]) @ altup.prediction.double().T).unflatten(-1, (count, count))
    return v + torch.einsum("tij,jth->ith", factors, v)


def corrected(altup: AltUp, active: int, v: Tensor, x: Tensor) -> Tensor:
    """The versions [n, tokens, hidden] after a layer, which has made x of the active one."""
    factors = 1 + routed(altup, x) @ altup.correction.double().T
    return v + factors.T[..., None] * (x - v[active])


def with_laurel(laurel: Laurel | None, x: Tensor, y: Tensor) -> Tensor:
    """The residual stream x after attention, whose input was y."""
    if laurel is None:
        return x
    return laurel.scale * (x + y + apply_norm(laurel.norm, apply(laurel.right, apply(laurel.left, y))))


def interpret(description: Description, tokens: list[int]) -> Tensor:
    """Logits [n, vocabulary] in float64, with full attention at absolute positions."""
    x = numbers(description.embedding)[tokens] * description.embedding_scale
    if description.learned_positions is not None:
        start = description.learned_offset
        x = x + description.learned_positions[start : start + len(tokens)]
    x = apply_norm(description.embedding_norm, x)
    own = embeddings_of_layers(description, tokens, x) if description.layer_embeddings else None
    scale, vector = description.residual_scale, x[:, :0]
    several = description.versions
    v, active = (versions_of(several, x), several.active) if several else (x[None], 0)
    for number, layer in enumerate(description.layers):
        if layer.altup is not None:
            v = predicted(layer.altup, active, v)
            x = v[active]
        added, vector = mixed(layer, x, vector)
        before, x = x, x + scale * apply_norm(layer.after_attention, added)
        x = with_laurel(layer.laurel, x, apply_norm(layer.before_attention, before))
        read = before if layer.parallel else x
        if layer.mlp is not None:
            x = x + scale * apply_norm(layer.after_mlp, feed_forward(layer, read))
        if (part := layer.own_embedding) is not None:
            assert own is not None
            assert isinstance(layer.mlp, Mlp | Experts)
            read = x
            if layer.altup is not None:
                v, factors = corrected(layer.altup, active, v, x), layer.altup.embedding_scale
                read = v[active] * (1.0 if factors is None else factors.double())
            gate = gated(layer.mlp.activation, layer.mlp.parameters, apply(part.gate, read), own[:, number])
            added = apply_norm(part.norm, apply(part.out, gate))
            x, v = x + added, torch.cat((v[:1], v[1:] + added))
        x = x * layer.output_scale
    x = merged(several, v) if several else x
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
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for parameter in (*model.parameters(), *biases):
        if parameter.dim() == 1 or not parameter.any():
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model
