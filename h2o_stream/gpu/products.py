"""Products, norms and activations of steps and prompts.

A step of one row multiplies each matrix by a vector and is bound by the weights that it reads: norm, bias, gate and
residual are done by the same kernel, which with PDL loads its first weights before the kernel before it has ended.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from h2o_stream.native.abi import Activation

SILU = tl.constexpr(int(Activation.SILU))
GELU_TANH = tl.constexpr(int(Activation.GELU_TANH))
GELU_ERF = tl.constexpr(int(Activation.GELU_ERF))
RELU = tl.constexpr(int(Activation.RELU))
RELU_SQUARED = tl.constexpr(int(Activation.RELU_SQUARED))
CLAMPED_SWIGLU = tl.constexpr(int(Activation.CLAMPED_SWIGLU))


@triton.jit
def activated(x, KIND: tl.constexpr):
    """The activation of an MLP."""
    if KIND == SILU:
        y = x * tl.sigmoid(x)
    elif KIND == GELU_TANH:
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == GELU_ERF:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        y = tl.maximum(x, 0.0)
        if KIND == RELU_SQUARED:
            y = y * y
    return y


@triton.jit
def gated(gate, up, KIND: tl.constexpr, PARAMETERS: tl.constexpr):
    """What gates of an MLP let through, under an activation with these parameters; see `abi.h`."""
    if KIND == CLAMPED_SWIGLU:
        gate = tl.minimum(gate, PARAMETERS[1])
        up = tl.minimum(tl.maximum(up, -PARAMETERS[1]), PARAMETERS[1])
        y = gate * tl.sigmoid(PARAMETERS[0] * gate) * (up + PARAMETERS[2])
    else:
        y = up * activated(gate, KIND)
    return y


@triton.jit
def finish(y, lines, added, out, scale, add_scale, ACTIVATION: tl.constexpr):
    """Store products: under an activation, if it is one, scaled, and added to what there is."""
    if ACTIVATION >= 0:
        y = activated(y, ACTIVATION)
    y *= scale
    if added is not None:
        y = y * add_scale + tl.load(added + lines).to(tl.float32)
    tl.store(out + lines, y.to(out.dtype.element_ty))


@triton.jit
def gemv_kernel(
    x, weight, second, third, bias, second_bias, third_bias, norm, added, out, rows, second_rows, stride, eps, scale,
    add_scale, M: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Out = scale * (weight @ x + bias) for M vectors x [M, K], each as if alone; program: BN lines.

    Rows of `out` and `added` are `stride` apart.

    Up to three matrices [*, K] below each other, of `rows`, `second_rows` and more lines, multiples of BN. With GATED
    `weight` are gates instead: out = activation(weight @ x) * (second @ x). ACTIVATION -1 is none. x is under an RMS
    norm with weights `norm` [K] if there are any; to the result, times `add_scale`, `added` is added.
    """
    if PDL:
        gdc_launch_dependents()
    first = tl.program_id(0) * BN
    lines = first + tl.arange(0, BN)
    cols = tl.arange(0, BK)
    line = lines
    matrix, biases = weight, bias
    if second is not None and not GATED:
        beyond = first >= rows
        matrix = tl.where(beyond, second, matrix)
        line = tl.where(beyond, lines - rows, line)
        if bias is not None:
            biases = tl.where(beyond, second_bias, biases)
        if third is not None:
            beyond = first >= rows + second_rows
            matrix = tl.where(beyond, third, matrix)
            line = tl.where(beyond, lines - rows - second_rows, line)
            if bias is not None:
                biases = tl.where(beyond, third_bias, biases)
    offset = line.to(tl.int64)[:, None] * K + cols[None, :]
    if K % BK == 0:
        w = tl.load(matrix + offset)
        if GATED:
            w2 = tl.load(second + offset)
    else:
        w = tl.load(matrix + offset, mask=(cols < K)[None, :], other=0.0)
        if GATED:
            w2 = tl.load(second + offset, mask=(cols < K)[None, :], other=0.0)
    zeros = tl.zeros([BN, BK], tl.float32)
    acc, acc2, squares = (), (), ()
    for _ in tl.static_range(M):
        acc += (zeros,)
        acc2 += (zeros,)
        squares += (tl.zeros([BK], tl.float32),)
    if PDL:
        gdc_wait()
    for k in tl.static_range(0, K, BK):
        if k + BK < K:  # the next block is loaded before this one is multiplied
            if K % BK == 0:
                next_w = tl.load(matrix + offset + (k + BK))
                if GATED:
                    next_w2 = tl.load(second + offset + (k + BK))
            else:
                ok = (k + BK + cols < K)[None, :]
                next_w = tl.load(matrix + offset + (k + BK), mask=ok, other=0.0)
                if GATED:
                    next_w2 = tl.load(second + offset + (k + BK), mask=ok, other=0.0)
        before, before2, squares_before = acc, acc2, squares
        acc, acc2, squares = (), (), ()
        for row in tl.static_range(M):
            v = tl.load(x + row * K + k + cols, mask=k + cols < K, other=0.0).to(tl.float32)
            squares += (squares_before[row] + v * v,)
            if norm is not None:
                v *= tl.load(norm + k + cols, mask=k + cols < K, other=0.0)
            acc += (before[row] + w.to(tl.float32) * v[None, :],)
            acc2 += (before2[row] + w2.to(tl.float32) * v[None, :] if GATED else zeros,)
        if k + BK < K:
            w = next_w
            if GATED:
                w2 = next_w2
    for row in tl.static_range(M):
        factor = 1.0
        if norm is not None:
            factor = 1.0 / tl.sqrt(tl.sum(squares[row], 0) / K + eps)
        y = tl.sum(acc[row], 1) * factor
        if bias is not None:
            y += tl.load(biases + line)
        if GATED:
            up = tl.sum(acc2[row], 1) * factor
            if second_bias is not None:
                up += tl.load(second_bias + line)
            y = activated(y, ACTIVATION) * up
        finish(y, row * stride + lines, added, out, scale, add_scale, -1 if GATED else ACTIVATION)


@triton.jit
def normed(v, ok, weight, bias, cols, eps, K, LAYER: tl.constexpr):
    """A vector [K] under a norm, by columns `cols` that are `ok`."""
    if LAYER:
        v = tl.where(ok, v - tl.sum(v, 0) / K, 0.0)
    v = v * (1.0 / tl.sqrt(tl.sum(v * v, 0) / K + eps)) * tl.load(weight + cols, mask=ok, other=0.0)
    if bias is not None:
        v += tl.load(bias + cols, mask=ok, other=0.0)
    return v


@triton.jit
def norm_kernel(
    x, added, after, after_bias, before, before_bias, out, after_eps, before_eps, add_scale, K: tl.constexpr,
    AFTER_LAYER: tl.constexpr, BEFORE_LAYER: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add `added`, under the norm `after` if there is one, to x [rows, K] in place; `out` is the sum under `before`.

    Nothing is added without `added`, and nothing else is given without `before`.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64) * K
    cols = tl.arange(0, BK)
    ok = cols < K
    v = tl.load(x + at + cols, mask=ok, other=0.0).to(tl.float32)
    if added is not None:
        y = tl.load(added + at + cols, mask=ok, other=0.0).to(tl.float32)
        if after is not None:
            y = normed(y, ok, after, after_bias, cols, after_eps, K, AFTER_LAYER)
        v += y * add_scale
        tl.store(x + at + cols, v.to(x.dtype.element_ty), mask=ok)
    if before is not None:
        v = normed(v, ok, before, before_bias, cols, before_eps, K, BEFORE_LAYER)
        tl.store(out + at + cols, v.to(out.dtype.element_ty), mask=ok)


@triton.jit
def norm_in_place_kernel(
    x, weight, second_weight, width, start, second_start, size, second_size, eps, second_eps, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Put one or two parts of rows of x [*, width], from some columns on, under RMS norms; program: a part of a row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if second_weight is not None:
        second = tl.program_id(1) > 0
        weight, eps = tl.where(second, second_weight, weight), tl.where(second, second_eps, eps)
        start, size = tl.where(second, second_start, start), tl.where(second, second_size, size)
    cols = tl.arange(0, BK)
    ok, at = cols < size, x + tl.program_id(0).to(tl.int64) * width + start + cols
    v = normed(tl.load(at, mask=ok, other=0.0).to(tl.float32), ok, weight, None, cols, eps, size, False)
    tl.store(at, v.to(x.dtype.element_ty), mask=ok)


@triton.jit
def gate_kernel(gate, up, out, width, N, ACTIVATION: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr):
    """Out [rows, N] = activation(gate) * up, rows of which are `width` apart, or activation(gate) without `up`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    y = activated(tl.load(gate + row * width + cols, mask=cols < N, other=0.0).to(tl.float32), ACTIVATION)
    if up is not None:
        y *= tl.load(up + row * width + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + cols, y.to(out.dtype.element_ty), mask=cols < N)
