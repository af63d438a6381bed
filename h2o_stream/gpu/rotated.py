"""Heads of a prompt that are rotated in memory, and their products."""

import triton
import triton.language as tl


@triton.jit
def rotate(source, target, ok, distance, table, factor, R, D, HP: tl.constexpr, TP: tl.constexpr,
            ROTATE: tl.constexpr, TAIL: tl.constexpr, kind: tl.constexpr):  # fmt: skip
    """Copy heads [n] that are `ok` from pointers [n] to pointers [n], rotated by `distance` [n]; others are zero."""
    low, rest = tl.arange(0, HP), tl.arange(0, TP)
    if ROTATE:
        mask = ok[:, None] & (low < R // 2)[None, :]
        turn = table + distance[:, None].to(tl.int64) * R + low[None, :]
        cos = tl.load(turn, mask=mask, other=0.0).to(tl.float32) * factor
        sin = tl.load(turn + R // 2, mask=mask, other=0.0).to(tl.float32) * factor
        x = tl.load(source[:, None] + low[None, :], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(source[:, None] + R // 2 + low[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(target[:, None] + low[None, :], (x * cos + y * sin).to(kind))
        tl.store(target[:, None] + HP + low[None, :], (y * cos - x * sin).to(kind))
    if TAIL:
        mask = ok[:, None] & (rest < D - R)[None, :]
        z = tl.load(source[:, None] + R + rest[None, :], mask=mask, other=0.0)
        tl.store(target[:, None] + 2 * HP * ROTATE + rest[None, :], z.to(kind))


@triton.jit
def products(keys, q1, q2, q3, count: tl.constexpr, DT: tl.constexpr, HP: tl.constexpr, TP: tl.constexpr,
              ROTATE: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """[count, C] products of the keys at a pointer, DT numbers apart, with the parts of queries [*, C]."""
    at = keys + tl.arange(0, count)[:, None] * DT
    low, rest = tl.arange(0, HP)[None, :], tl.arange(0, TP)[None, :]
    if ROTATE:
        sums = tl.dot(tl.load(at + low), q1, input_precision=PRECISION)
        sums = tl.dot(tl.load(at + HP + low), q2, sums, input_precision=PRECISION)
        if TAIL:
            sums = tl.dot(tl.load(at + 2 * HP + rest), q3, sums, input_precision=PRECISION)
    else:
        sums = tl.dot(tl.load(at + rest), q3, input_precision=PRECISION)
    return sums
