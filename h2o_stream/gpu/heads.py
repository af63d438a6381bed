"""Heads of a new token, by their rotary halves and the rest."""

import triton
import triton.language as tl


@triton.jit
def dims_of(start, count, size: tl.constexpr):
    """`size` dimensions of a head from `start` on, and which of them are among `count`."""
    dims = tl.arange(0, size)
    return start + dims, dims < count


@triton.jit
def _scaled(x, dims, ok, weight, rms):
    """Vectors [n, dims] over their root mean square [n], times weights."""
    return x * rms[:, None] * tl.load(weight + dims, mask=ok, other=0.0)[None, :]


@triton.jit
def heads_of(at, stride, heads, real, norm, eps, factor, D, R, HP: tl.constexpr, TP: tl.constexpr,
             ROTATE: tl.constexpr, TAIL: tl.constexpr, kind: tl.constexpr):  # fmt: skip
    """Heads [n] of a token: both rotary halves and the rest, after their norm; what is not there is the rest again."""
    low, low_ok = dims_of(0, R // 2, HP)
    high, _ = dims_of(R // 2, R // 2, HP)
    rest, rest_ok = dims_of(R, D - R, TP)
    base = at + heads[:, None] * stride
    squares = tl.zeros([heads.shape[0]], tl.float32)
    if ROTATE:
        first = tl.load(base + low[None, :], mask=real[:, None] & low_ok[None, :], other=0.0).to(tl.float32)
        second = tl.load(base + high[None, :], mask=real[:, None] & low_ok[None, :], other=0.0).to(tl.float32)
        squares += tl.sum(first * first, 1) + tl.sum(second * second, 1)
    if TAIL:
        third = tl.load(base + rest[None, :], mask=real[:, None] & rest_ok[None, :], other=0.0).to(tl.float32)
        squares += tl.sum(third * third, 1)
    if norm is not None:
        rms = 1.0 / tl.sqrt(squares / D + eps)
        if ROTATE:
            first = _scaled(first, low, low_ok, norm, rms)
            second = _scaled(second, high, low_ok, norm, rms)
        if TAIL:
            third = _scaled(third, rest, rest_ok, norm, rms)
    if ROTATE:
        first, second = (first * factor).to(kind), (second * factor).to(kind)
    if TAIL:
        third = third.to(kind)
    if not ROTATE:
        first, second = third, third
    if not TAIL:
        third = first
    return first, second, third
