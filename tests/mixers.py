"""Recurrent mixers token by token in float64, as their papers write them, from the outputs of their projections."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from h2o_stream.native.mixers import Convolution, GatedDelta, Mamba2, ShortConvolution


def convolved(convolution: Convolution, x: Tensor) -> Tensor:
    """[n, channels]: each the weighted sum of the last inputs of its channel."""
    weight, kernel = convolution.weight.double(), convolution.kernel
    padded = torch.cat((torch.zeros(kernel - 1, x.shape[1], dtype=x.dtype), x))
    y = torch.stack([(padded[n : n + kernel] * weight.T).sum(0) for n in range(len(x))])
    return y if convolution.bias is None else y + convolution.bias.double()


def short_convolution(mixer: ShortConvolution, projected: Tensor) -> Tensor:
    b, c, x = projected.chunk(3, -1)
    return c * convolved(mixer.convolution, b * x)


def gated_delta(mixer: GatedDelta, projected: Tensor) -> Tensor:
    """Head by head and token by token: S = keep S (1 - learn k k^T) + learn v k^T, as in arXiv 2412.06464."""
    shared, key_size, size = mixer.heads // mixer.key_heads, mixer.key_size, mixer.value_size
    rate, bias, weight = (x.detach().double() for x in (mixer.rate, mixer.decay_bias, mixer.norm.weight))
    outputs = []
    for head in range(mixer.heads):
        group, place = divmod(head, shared)

        def part(name: str, count: int, first: int = 0, group: int = group) -> Tensor:
            at = getattr(mixer.columns, name)
            start = at.offset + group * at.stride + first
            return projected[:, start : start + count]

        def after_convolution(first: int, x: Tensor) -> Tensor:
            weights = mixer.convolution.weight[first : first + x.shape[1]]
            return torch.nn.functional.silu(convolved(Convolution(weights, None), x))

        keys = mixer.key_heads * key_size
        query = after_convolution(group * key_size, part("query", key_size))
        key = after_convolution(keys + group * key_size, part("key", key_size))
        value = after_convolution(2 * keys + head * size, part("value", size, place * size))
        query, key = (x / (x.square().sum(1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
        learn = mixer.beta_scale * part("beta", 1, place).sigmoid()[:, 0]
        keep = (rate[head] * (1 + (part("decay", 1, place)[:, 0] + bias[head]).exp()).log()).exp()
        state, read = torch.zeros(size, key_size, dtype=torch.float64), []
        for n, k in enumerate(key):
            forget = torch.eye(key_size, dtype=torch.float64) - learn[n] * torch.outer(k, k)
            state = keep[n] * state @ forget + learn[n] * torch.outer(value[n], k)
            read.append(state @ query[n] / key_size**0.5)
        normed = torch.stack(read)
        normed = normed / (normed.square().mean(1, keepdim=True) + mixer.norm.epsilon).sqrt() * weight
        outputs.append(normed * torch.nn.functional.silu(part("gate", size, place * size)))
    return torch.cat(outputs, 1)


def mamba2(mixer: Mamba2, projected: Tensor) -> Tensor:
    """Head by head and all tokens at once: y = (L * C B^T) (step * x) + D x with L of products of decays."""
    inner, keys, size, n = mixer.inner, mixer.keys, mixer.value_size, len(projected)
    rate, bias, skip = (x.detach().double() for x in (mixer.rate, mixer.decay_bias, mixer.skip))
    silu = torch.nn.functional.silu
    x, b, c = silu(convolved(mixer.convolution, projected[:, inner : 2 * (inner + keys)])).split([inner, keys, keys], 1)
    outputs = []
    for head in range(mixer.heads):
        start = head * mixer.key_heads // mixer.heads * mixer.key_size
        key, query = (part[:, start : start + mixer.key_size] for part in (b, c))
        value = x[:, head * size : (head + 1) * size]
        step = (1 + (projected[:, 2 * (inner + keys) + head] + bias[head]).exp()).log().clamp(*mixer.step_limits)
        sums = (rate[head] * step).cumsum(0)
        decay = torch.tril((sums[:, None] - sums[None]).exp())
        outputs.append((decay * (query @ key.T)) @ (step[:, None] * value) + skip[head] * value)
    y, gate = torch.cat(outputs, 1), silu(projected[:, :inner])

    def normed(y: Tensor) -> Tensor:
        if mixer.norm.weight is None:
            return y
        parts = y.view(n, mixer.norm_groups, -1)
        parts = parts / (parts.square().mean(-1, keepdim=True) + mixer.norm.epsilon).sqrt()
        return parts.flatten(1) * mixer.norm.weight.double()

    return normed(y) * gate if mixer.norm_before_gate else normed(y * gate)


MIXERS: dict[type, Callable[[Any, Tensor], Tensor]] = {
    ShortConvolution: short_convolution,
    GatedDelta: gated_delta,
    Mamba2: mamba2,
}
