"""Recurrent mixers: what a layer carries from token to token is a state of constant size; and gates of attention.

Tokens of a stream follow one another in each kernel, one of a step or all of a prompt. A state is written by one kernel
of a step only, so that with PDL it is loaded while the kernel before ends. The arithmetic is that of
`native/src/gated_delta.cpp`, `mamba2.cpp` and `short_convolution.cpp`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LENGTH_EPSILON = tl.constexpr(1e-6)  # added to the square of the length of queries and keys


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), exact also where that is small."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    return tl.maximum(x, 0.0) + tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _inputs(projected, at, ok, state, second: tl.constexpr):
    """What a convolution reads of a token, as its state will have it: numbers, times those `second` numbers before."""
    x = tl.load(projected + at, mask=ok, other=0.0).to(tl.float32)
    if second:
        x *= tl.load(projected + at - second, mask=ok, other=0.0).to(tl.float32)
    return x.to(state.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def convolution_kernel(
    projected, state, weight, bias, out, tokens, width, query_offset, query_stride, key_offset, key_stride,
    value_offset, value_stride, CHANNELS: tl.constexpr, KEYS: tl.constexpr, KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr, GATED: tl.constexpr, KERNEL: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Convolutions of all channels by themselves, under SiLU; program: BC channels of a row.

    Channels are KEYS numbers of queries, as many of keys, and values, each from its offset on in a row of `projected`
    [B tokens, width] and of heads that are a stride apart. With GATED there are values only, and in front of them
    factors of the result and, before these, of what goes in, which take SiLU's place. The state [B, CHANNELS, KERNEL]
    has the last inputs, the newest last. BC is at least the number of threads.
    """
    if PDL:
        gdc_launch_dependents()
    row, channel = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    ok = channel < CHANNELS
    state += (row.to(tl.int64) * CHANNELS + channel) * KERNEL
    beyond = channel - 2 * KEYS
    column = value_offset + beyond // VALUE_SIZE * value_stride + beyond % VALUE_SIZE
    if KEYS:
        key = channel - KEYS
        of_key = key_offset + key // KEY_SIZE * key_stride + key % KEY_SIZE
        of_query = query_offset + channel // KEY_SIZE * query_stride + channel % KEY_SIZE
        column = tl.where(key < 0, of_query, tl.where(beyond < 0, of_key, column))
    projected += row.to(tl.int64) * tokens * width + column
    out += row.to(tl.int64) * tokens * CHANNELS + channel
    second: tl.constexpr = 2 * CHANNELS if GATED else 0
    if PDL:
        gdc_wait()

    for start in range(0, tokens, BT):
        token = start + tl.arange(0, BT)[:, None]
        there = (token < tokens) & ok[None, :]
        y = tl.zeros([BT, BC], tl.float32)
        if bias is not None:
            y += tl.load(bias + channel, mask=ok, other=0.0)[None, :]
        for tap in tl.static_range(KERNEL):
            at = token + (tap + 1 - KERNEL)
            x = _inputs(projected[None, :], at.to(tl.int64) * width, there & (at >= 0), state, second)
            x += tl.load(state[None, :] + (KERNEL + at), mask=there & (at < 0), other=0.0).to(tl.float32)
            y += x * tl.load(weight + channel * KERNEL + tap, mask=ok, other=0.0)[None, :]
        if GATED:
            factor = tl.load(projected[None, :] + token.to(tl.int64) * width - CHANNELS, mask=there, other=0.0)
            y *= factor.to(tl.float32)
        else:
            y = _silu(y)
        tl.store(out[None, :] + token.to(tl.int64) * CHANNELS, y.to(out.dtype.element_ty), mask=there)

    last = ()
    for tap in tl.static_range(KERNEL):
        at = tokens - KERNEL + tap
        x = _inputs(projected, at.to(tl.int64) * width, ok & (at >= 0), state, second)
        last += (x + tl.load(state + tokens + tap, mask=ok & (at < 0), other=0.0).to(tl.float32),)
    tl.debug_barrier()
    for tap in tl.static_range(KERNEL):
        tl.store(state + tap, last[tap].to(state.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["tokens"])
def delta_kernel(
    x, projected, state, rate, decay_bias, norm, out, tokens, width, beta_scale, eps, gate_offset, gate_stride,
    beta_offset, beta_stride, decay_offset, decay_stride, KEY_HEADS: tl.constexpr, SHARED: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, IN_TURNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The gated delta rule; program: a value head of a row. See `native.mixers.GatedDelta`.

    x [B tokens, *] are queries, keys and values of all heads; the state is [B, heads, K, V].
    """
    if PDL:
        gdc_launch_dependents()
    heads: tl.constexpr = KEY_HEADS * SHARED
    row, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    group, member = head // SHARED, head % SHARED
    i, j = tl.arange(0, KP), tl.arange(0, VP)
    key_ok, value_ok = i < K, j < V
    state += tl.program_id(0).to(tl.int64) * K * V + i[:, None] * V + j[None, :]
    s = tl.load(state, mask=key_ok[:, None] & value_ok[None, :], other=0.0).to(tl.float32)
    rate_of, bias_of = tl.load(rate + head), tl.load(decay_bias + head)
    if PDL:
        gdc_wait()

    place = head
    if IN_TURNS:
        place = member * KEY_HEADS + group
    for number in range(tokens):
        token = row.to(tl.int64) * tokens + number
        of_token = x + token * (2 * KEY_HEADS * K + heads * V)
        query = tl.load(of_token + group * K + i, mask=key_ok, other=0.0).to(tl.float32)
        key = tl.load(of_token + (KEY_HEADS + group) * K + i, mask=key_ok, other=0.0).to(tl.float32)
        value = tl.load(of_token + 2 * KEY_HEADS * K + head * V + j, mask=value_ok, other=0.0).to(tl.float32)
        factors = projected + token * width
        decay = tl.load(factors + decay_offset + group * decay_stride + member).to(tl.float32)
        beta = tl.load(factors + beta_offset + group * beta_stride + member).to(tl.float32)
        gate = tl.load(factors + gate_offset + group * gate_stride + member * V + j, mask=value_ok, other=0.0)
        query *= 1.0 / tl.sqrt((tl.sum(query * query, 0) + _LENGTH_EPSILON) * K)
        key *= 1.0 / tl.sqrt(tl.sum(key * key, 0) + _LENGTH_EPSILON)
        s *= tl.exp(rate_of * _softplus(decay + bias_of))
        learned = (value - tl.sum(s * key[:, None], 0)) * (beta_scale * tl.sigmoid(beta))
        s += key[:, None] * learned[None, :]
        y = tl.sum(s * query[:, None], 0)
        y *= 1.0 / tl.sqrt(tl.sum(y * y, 0) / V + eps) * tl.load(norm + j, mask=value_ok, other=0.0)
        y *= _silu(gate.to(tl.float32))
        tl.store(out + (token * heads + place) * V + j, y.to(out.dtype.element_ty), mask=value_ok)
    tl.store(state, s.to(state.dtype.element_ty), mask=key_ok[:, None] & value_ok[None, :])


@triton.jit(do_not_specialize=["tokens"])
def mamba2_kernel(
    x, projected, state, rate, decay_bias, skip, out, tokens, width, decay_offset, least_step, largest_step,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    BV: tl.constexpr, PROMPT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A state space; program: BV values of a head of a row. See `native.mixers.Mamba2`.

    x [B tokens, *] are values, keys and queries of all heads; the state is [B, HEADS, V, K], out [B tokens, HEADS V].
    """
    if PDL:
        gdc_launch_dependents()
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    i, j = tl.arange(0, KP), tl.program_id(1) * BV + tl.arange(0, BV)
    key_ok, value_ok = i < K, j < V
    state += tl.program_id(0).to(tl.int64) * K * V + j[:, None] * K + i[None, :]
    s = tl.load(state, mask=value_ok[:, None] & key_ok[None, :], other=0.0).to(tl.float32)
    rate_of, bias_of, skip_of = tl.load(rate + head), tl.load(decay_bias + head), tl.load(skip + head)
    if PDL:
        gdc_wait()

    for number in range(tokens):
        token = row.to(tl.int64) * tokens + number
        of_token = x + token * (HEADS * V + 2 * KEY_HEADS * K)
        keys = of_token + HEADS * V + head // (HEADS // KEY_HEADS) * K + i
        key = tl.load(keys, mask=key_ok, other=0.0).to(tl.float32)
        query = tl.load(keys + KEY_HEADS * K, mask=key_ok, other=0.0).to(tl.float32)
        value = tl.load(of_token + head * V + j, mask=value_ok, other=0.0).to(tl.float32)
        step = _softplus(tl.load(projected + token * width + decay_offset + head).to(tl.float32) + bias_of)
        if PROMPT:
            step = tl.minimum(tl.maximum(step, least_step), largest_step)
        s = s * tl.exp(rate_of * step) + (step * value)[:, None] * key[None, :]
        y = tl.sum(s * query[None, :], 1) + skip_of * value
        tl.store(out + (token * HEADS + head) * V + j, y, mask=value_ok)
    tl.store(state, s.to(state.dtype.element_ty), mask=value_ok[:, None] & key_ok[None, :])


@triton.jit
def gated_norm_kernel(
    x, gate, norm, out, width, eps, N: tl.constexpr, GROUPS: tl.constexpr, BN: tl.constexpr,
    NORM_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Out [tokens, GROUPS N] = norm(x silu(gate)) of groups of N, or norm(x) silu(gate); program: a group of a token.

    Rows of `gate` are `width` apart.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * N + tl.arange(0, BN)
    ok = tl.arange(0, BN) < N
    y = tl.load(x + token * (GROUPS * N) + column, mask=ok, other=0.0)
    factor = _silu(tl.load(gate + token * width + column, mask=ok, other=0.0).to(tl.float32))
    if not NORM_FIRST:
        y *= factor
    if norm is not None:
        y *= 1.0 / tl.sqrt(tl.sum(y * y, 0) / N + eps) * tl.load(norm + column, mask=ok, other=0.0)
    if NORM_FIRST:
        y *= factor
    tl.store(out + token * (GROUPS * N) + column, y.to(out.dtype.element_ty), mask=ok)


@triton.jit
def attention_gate_kernel(
    out, projected, width, gate_offset, gate_stride, HEADS: tl.constexpr, V: tl.constexpr, SIZE: tl.constexpr,
    BV: tl.constexpr, SOFTPLUS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply the output [tokens, HEADS V] of an attention by its gates, in place; program: a head of a token."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, head, j = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BV)
    of_head = projected + token * width + gate_offset + head * gate_stride
    gate = tl.load(of_head + j * (SIZE > 1), mask=j < V, other=0.0).to(tl.float32)
    gate = _softplus(gate) if SOFTPLUS else tl.sigmoid(gate)
    at = out + (token * HEADS + head) * V + j
    y = tl.load(at, mask=j < V, other=0.0).to(tl.float32) * gate
    tl.store(at, y.to(out.dtype.element_ty), mask=j < V)
