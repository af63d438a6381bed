"""Recurrent mixers under Triton's interpreter, against their definitions in float64. `tests/test_gpu.py` runs them."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from h2o_stream import CacheConfig, attach
from h2o_stream.gpu import available
from h2o_stream.native.abi import GateKind, MatrixKind, NormKind
from h2o_stream.native.attention import Gate
from h2o_stream.native.matrix import Matrix, Norm
from h2o_stream.native.mixers import Convolution, GatedDelta, HeadColumns, Mamba2, ShortConvolution
from h2o_stream.runtime.mixers import columns_by_key_head, paired_columns, separate_columns
from tests.fixtures import ids
from tests.test_gpu_steps import family

pytestmark = pytest.mark.skipif(os.environ.get(available.INTERPRET) != "1", reason="Triton does not interpret kernels")

HIDDEN, KERNEL = 6, 4


def matrix(rows: int, columns: int = HIDDEN) -> Matrix:
    return Matrix(torch.zeros(rows, columns), None, rows, columns, MatrixKind.FLOAT32)


def convolution(channels: int, bias: bool) -> Convolution:
    return Convolution(torch.randn(channels, KERNEL), torch.randn(channels) if bias else None)


def delta(columns: Any, in_turns: bool) -> GatedDelta:
    keys, heads, key, value = 2, 4, 6, 5
    rows = 2 * (keys * key + heads * value + heads)
    return GatedDelta(
        [matrix(rows)], columns(keys, heads, key, value), convolution(2 * keys * key + heads * value, True), keys,
        heads, key, value, -torch.rand(heads), torch.randn(heads), 2.0,
        Norm(NormKind.RMS, torch.rand(value), None, 1e-5), matrix(HIDDEN, heads * value), in_turns,
    )  # fmt: skip


def mamba2(norm_groups: int, before: bool, normed: bool = True) -> Mamba2:
    keys, heads, key, value = 2, 4, 7, 5
    inner = heads * value
    norm = Norm(NormKind.RMS, torch.rand(inner), None, 1e-5) if normed else Norm()
    return Mamba2(
        [matrix(2 * inner + 2 * keys * key + heads)], convolution(inner + 2 * keys * key, False), keys, heads, key,
        value, -torch.rand(heads), torch.randn(heads), (0.3, 0.9), torch.randn(heads), norm, norm_groups, before,
        matrix(HIDDEN, inner),
    )  # fmt: skip


def convolved(mixer: Any, x: Tensor, state: Tensor) -> Tensor:
    """[Q, channels] of one stream; the state is updated."""
    inputs = torch.cat([state, x.T], 1)
    state.copy_(inputs[:, -KERNEL:])
    windows = inputs[:, 1:].unfold(1, KERNEL, 1)
    y = (windows * mixer.convolution.weight.double()[:, None]).sum(-1).T
    bias = mixer.convolution.bias
    return y if bias is None else y + bias.double()


def columns_of(x: Tensor, at: HeadColumns, groups: int, size: int) -> Tensor:
    """[Q, groups, size]"""
    return torch.stack([x[:, at.offset + g * at.stride :][:, :size] for g in range(groups)], 1)


def rms(x: Tensor, norm: Norm) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], None, norm.epsilon)


def expected(mixer: Any, x: Tensor, states: list[Tensor], in_prompt: bool) -> Tensor:
    """[Q, columns of the last matrix] of one stream, whose states are updated."""
    if isinstance(mixer, ShortConvolution):
        before, after, values = x.chunk(3, 1)
        return after * convolved(mixer, before * values, states[0])
    keys, heads, key, value = mixer.key_heads, mixer.heads, mixer.key_size, mixer.value_size
    shared, s, out = heads // keys, states[1], []
    rate, bias = mixer.rate.double(), mixer.decay_bias.double()
    if isinstance(mixer, GatedDelta):
        sizes = {"query": key, "key": key, "value": shared * value}
        sizes |= {"gate": shared * value, "beta": shared, "decay": shared}
        parts = {name: columns_of(x, getattr(mixer.columns, name), keys, size) for name, size in sizes.items()}
        mixed = torch.cat([parts[name].flatten(1) for name in ("query", "key", "value")], 1)
        mixed = functional.silu(convolved(mixer, mixed, states[0]))
        q, k, v = (x.unflatten(1, shape) for x, shape in zip(
            mixed.split((keys * key, keys * key, heads * value), 1), ((keys, key), (keys, key), (heads, value)),
            strict=True))  # fmt: skip
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = ((x * f).repeat_interleave(shared, 1) for x, f in ((q, key**-0.5), (k, 1)))
        keep = (rate * functional.softplus(parts["decay"].flatten(1) + bias)).exp()
        learn = mixer.beta_scale * parts["beta"].flatten(1).sigmoid()
        for t in range(len(x)):
            s *= keep[t, :, None, None]
            s += k[t, :, :, None] * ((v[t] - (s * k[t, :, :, None]).sum(1)) * learn[t, :, None])[:, None]
            out.append((s * q[t, :, :, None]).sum(1))
        y = rms(torch.stack(out), mixer.norm) * mixer.norm.weight.double()
        y = y * functional.silu(parts["gate"].reshape(y.shape))
        return (y.unflatten(1, (keys, shared)).transpose(1, 2) if mixer.out_in_turns else y).flatten(1)
    inner = heads * value
    gate, mixed, decay = x[:, :inner], x[:, inner:-heads], x[:, -heads:]
    mixed = functional.silu(convolved(mixer, mixed, states[0]))
    v = mixed[:, :inner].unflatten(1, (heads, value))
    k, q = (x.unflatten(1, (keys, key)).repeat_interleave(shared, 1) for x in mixed[:, inner:].chunk(2, 1))
    step = functional.softplus(decay + bias)
    step = step.clamp(*mixer.step_limits) if in_prompt else step
    for t in range(len(x)):
        s *= (rate * step[t]).exp()[:, None, None]
        s += (step[t, :, None] * v[t])[:, :, None] * k[t, :, None]
        out.append((s * q[t, :, None]).sum(-1) + mixer.skip.double()[:, None] * v[t])
    y, gate = torch.stack(out).flatten(1), functional.silu(gate)

    def normed(y: Tensor) -> Tensor:
        if mixer.norm.weight is None:
            return y
        return rms(y.unflatten(1, (mixer.norm_groups, -1)), mixer.norm).flatten(1) * mixer.norm.weight.double()

    return normed(y) * gate if mixer.norm_before_gate else normed(y * gate)


def short_convolution() -> ShortConvolution:
    return ShortConvolution(matrix(3 * HIDDEN), convolution(HIDDEN, True), matrix(HIDDEN))


@pytest.mark.parametrize("make", [
    short_convolution, lambda: delta(separate_columns, False), lambda: delta(columns_by_key_head, False),
    lambda: delta(paired_columns, True), lambda: mamba2(1, False), lambda: mamba2(2, True),
    lambda: mamba2(1, False, normed=False),
], ids=["convolution", "delta", "by key head", "in turns", "mamba2", "norm first", "no norm"])  # fmt: skip
def test_as_defined(make: Any) -> None:
    """Prompts, also one that goes on, and steps, of two streams."""
    from h2o_stream.gpu.mixers import mix, why_not

    torch.manual_seed(0)
    mixer, rows = make(), 2
    assert not why_not(mixer)
    states = {name: torch.randn(rows, *shape) for name, shape in mixer.states.items()}
    exact = [[state[row].double() for state in states.values()] for row in range(rows)]
    size = sum(part.rows for part in mixer.projections)
    for tokens, in_prompt in ((19, True), (2, True), (1, False), (1, False)):
        x = torch.randn(rows * tokens, size)
        out = torch.full((rows * tokens, mixer.out.columns), float("nan"))
        mix(mixer, x, states, out, rows, in_prompt)
        theirs = [expected(mixer, part.double(), state, in_prompt) for part, state in zip(
            x.split(tokens), exact, strict=True)]  # fmt: skip
        assert torch.allclose(out.double(), torch.cat(theirs), rtol=1e-4, atol=1e-4)
    for number, state in enumerate(states.values()):
        assert torch.allclose(state.double(), torch.stack([each[number] for each in exact]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "size"), [(GateKind.SIGMOID_GATE, 5), (GateKind.SOFTPLUS_GATE, 1)])
def test_gates(kind: GateKind, size: int) -> None:
    from h2o_stream.gpu.mixers import apply_gate

    projected, out = torch.randn(3, 40), torch.randn(3, 15)
    factor = projected[:, 2 : 2 + 3 * 7].unflatten(1, (3, 7))[..., :size]
    factor = factor.sigmoid() if kind == GateKind.SIGMOID_GATE else functional.softplus(factor)
    wanted = (out.view(3, 3, 5) * factor).flatten(1)
    apply_gate(Gate(kind, 2, 7, size), projected, out, 3)
    assert torch.allclose(out, wanted, rtol=1e-5, atol=1e-6)


def test_what_is_refused() -> None:
    from h2o_stream.gpu.mixers import why_not

    large = delta(separate_columns, False)
    object.__setattr__(large, "key_size", 1024)
    object.__setattr__(large, "value_size", 64)
    assert why_not(large) == "its recurrent heads have more than 32768 numbers"


def test_a_new_stream_after_a_loaded_one() -> None:
    """Loading replaces the layers of the cache."""
    model = family("LFM2")
    with attach(model, CacheConfig(window=24)) as cache:
        first = model(ids(20), past_key_values=cache).logits
        cache.load_state_dict(cache.state_dict())
        cache.reset()
        assert cache.engine_note.startswith("fused")
        assert model(ids(20), past_key_values=cache).logits.equal(first)
