"""Weights in the blocks of GGUF files, as they are there, unpacked in registers.

A chunk of a row is as many weights as share the bytes of one load: of LANES bytes in PARTS parts of their bits. Weight
part * LANES + lane of a chunk is in the byte `lane`. `GEOMETRY` has the sizes of the types that are read here.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from h2o_stream.gpu.products import activated, finish
from h2o_stream.native.gguf_types import TensorType

Q4_0 = tl.constexpr(int(TensorType.Q4_0))
Q4_1 = tl.constexpr(int(TensorType.Q4_1))
Q5_0 = tl.constexpr(int(TensorType.Q5_0))
Q5_1 = tl.constexpr(int(TensorType.Q5_1))
Q8_0 = tl.constexpr(int(TensorType.Q8_0))
Q4_K = tl.constexpr(int(TensorType.Q4_K))
Q5_K = tl.constexpr(int(TensorType.Q5_K))
Q6_K = tl.constexpr(int(TensorType.Q6_K))

GEOMETRY: dict[int, tuple[int, int]] = {
    TensorType.Q4_0: (16, 2),
    TensorType.Q4_1: (16, 2),
    TensorType.Q5_0: (16, 2),
    TensorType.Q5_1: (16, 2),
    TensorType.Q8_0: (32, 1),
    TensorType.Q4_K: (32, 2),
    TensorType.Q5_K: (32, 2),
    TensorType.Q6_K: (32, 4),
}
"""LANES and PARTS by type."""


@triton.jit
def _byte(at, ok):
    return tl.load(at, mask=ok, other=0).to(tl.int32)


@triton.jit
def _half(at, ok):
    """A number in float16 at an even address."""
    return tl.load(at.to(tl.pointer_type(tl.float16)), mask=ok, other=0.0).to(tl.float32)


@triton.jit
def unpacked(row, chunk, lane, ok, PART: tl.constexpr, TYPE: tl.constexpr):
    """Weights [BN, J, LANES] of rows that begin at pointers [BN, 1, 1], chunks [1, J, 1] and lanes [1, 1, LANES]."""
    if TYPE == Q4_K or TYPE == Q5_K:
        block = row + (chunk // 4) * (144 if TYPE == Q4_K else 176)
        quarter = chunk % 4
        number = 2 * quarter + PART
        at = block + 4 + number % 4
        low, middle, high = _byte(at, ok), _byte(at + 4, ok), _byte(at + 8, ok)
        first = number < 4
        scale = tl.where(first, low & 63, (high & 15) | ((low >> 6) << 4))
        least = tl.where(first, middle & 63, (high >> 4) | ((middle >> 6) << 4))
        code = _byte(block + (16 if TYPE == Q4_K else 48) + 32 * quarter + lane, ok) >> (4 * PART) & 15
        if TYPE == Q5_K:
            code |= (_byte(block + 16 + lane, ok) >> number & 1) << 4
        weights = _half(block, ok) * scale * code - _half(block + 2, ok) * least
    elif TYPE == Q6_K:
        block = row + (chunk // 2) * 210
        half = chunk % 2
        code = _byte(block + 64 * half + 32 * (PART % 2) + lane, ok) >> (4 * (PART // 2)) & 15
        code |= (_byte(block + 128 + 32 * half + lane, ok) >> (2 * PART) & 3) << 4
        scale = (_byte(block + 192 + 8 * half + 2 * PART + lane // 16, ok) ^ 128) - 128
        weights = _half(block + 208, ok) * scale * (code - 32)
    elif TYPE == Q8_0:
        block = row + chunk * 34
        weights = _half(block, ok) * ((_byte(block + 2 + lane, ok) ^ 128) - 128)
    else:
        has_least: tl.constexpr = TYPE == Q4_1 or TYPE == Q5_1
        five: tl.constexpr = TYPE == Q5_0 or TYPE == Q5_1
        header: tl.constexpr = 2 + 2 * has_least + 4 * five
        block = row + chunk * (header + 16)
        code = _byte(block + header + lane, ok) >> (4 * PART) & 15
        if five:
            bits = _byte(block + header - 4 + 2 * PART + lane // 8, ok)
            code |= (bits >> (lane % 8) & 1) << 4
        if has_least:
            weights = _half(block, ok) * code + _half(block + 2, ok)
        else:
            weights = _half(block, ok) * (code - (16 if five else 8))
    return weights


@triton.jit
def _line(row, first, J: tl.constexpr, LANES: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr):
    """Chunks [1, J, 1] from the first on, lanes, and which chunks are in a row of K weights."""
    chunk = first + tl.arange(0, J)[None, :, None]
    return chunk, tl.arange(0, LANES)[None, None, :], chunk < K // (LANES * PARTS)


@triton.jit
def blocks_gemv_kernel(
    x, weight, second, bias, second_bias, norm, added, out, row_bytes, eps, scale, add_scale,
    K: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, TYPE: tl.constexpr, LANES: tl.constexpr,
    PARTS: tl.constexpr, BN: tl.constexpr, J: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `gemv_kernel`, of one matrix or of gates and `second`, in blocks [*, row_bytes]; program: BN lines."""
    lines = tl.program_id(0) * BN + tl.arange(0, BN)
    row = lines.to(tl.int64)[:, None, None] * row_bytes
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BN, J, LANES], tl.float32)
    acc2 = tl.zeros([BN, J, LANES], tl.float32)
    squares = tl.zeros([1, J, LANES], tl.float32)
    for first in range(0, K // (LANES * PARTS), J):
        chunk, lane, ok = _line(row, first, J, LANES, PARTS, K)
        for part in tl.static_range(PARTS):
            column = chunk * (LANES * PARTS) + part * LANES + lane
            v = tl.load(x + column, mask=ok, other=0.0).to(tl.float32)
            if norm is not None:
                squares += v * v
                v *= tl.load(norm + column, mask=ok, other=0.0)
            acc += unpacked(weight + row, chunk, lane, ok, part, TYPE) * v
            if GATED:
                acc2 += unpacked(second + row, chunk, lane, ok, part, TYPE) * v
    factor = 1.0
    if norm is not None:
        factor = 1.0 / tl.sqrt(tl.sum(tl.sum(tl.sum(squares, 2), 1), 0) / K + eps)
    y = tl.sum(tl.sum(acc, 2), 1) * factor
    if bias is not None:
        y += tl.load(bias + lines)
    if GATED:
        up = tl.sum(tl.sum(acc2, 2), 1) * factor
        if second_bias is not None:
            up += tl.load(second_bias + lines)
        y = activated(y, ACTIVATION) * up
    finish(y, lines, added, out, scale, add_scale, -1 if GATED else ACTIVATION)


@triton.jit
def blocks_rows_kernel(
    x, weight, bias, out, rows, lines_count, row_bytes, scale, K: tl.constexpr, TYPE: tl.constexpr, LANES: tl.constexpr,
    PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """out [rows, lines_count] = scale * (x [rows, K] @ W' + bias), for at most BM rows; program: BN lines of blocks."""
    lines = tl.program_id(0) * BN + tl.arange(0, BN)
    number, within = tl.arange(0, BM), tl.arange(0, J * LANES)
    of_block = lines.to(tl.int64)[:, None, None] * row_bytes
    acc = tl.zeros([BM, BN], tl.float32)
    for first in range(0, K // (LANES * PARTS), J):
        chunk, lane, inside = _line(of_block, first, J, LANES, PARTS, K)
        ok = inside & (lines < lines_count)[:, None, None]
        for part in tl.static_range(PARTS):
            weights = unpacked(weight + of_block, chunk, lane, ok & (lane >= 0), part, TYPE)
            column = (first + within // LANES) * (LANES * PARTS) + part * LANES + within % LANES
            v = tl.load(x + number[:, None] * K + column[None, :],
                        mask=(number < rows)[:, None] & (column < K)[None, :], other=0.0)  # fmt: skip
            weights = tl.reshape(weights.to(v.dtype), [BN, J * LANES])
            acc = tl.dot(v, tl.trans(weights), acc)
    there = (number < rows)[:, None] & (lines < lines_count)[None, :]
    if bias is not None:
        acc += tl.load(bias + lines, mask=lines < lines_count, other=0.0)[None, :]
    tl.store(out + number[:, None] * lines_count + lines[None, :], (acc * scale).to(out.dtype.element_ty), mask=there)


@triton.jit
def unpack_kernel(weight, out, rows, row_bytes, K: tl.constexpr, TYPE: tl.constexpr, LANES: tl.constexpr,
                  PARTS: tl.constexpr, BN: tl.constexpr, J: tl.constexpr):  # fmt: skip
    """out [rows, K] of blocks [rows, row_bytes]; program: BN rows, J chunks."""
    lines = (tl.program_id(0) * BN + tl.arange(0, BN))[:, None, None]
    row = lines.to(tl.int64) * row_bytes
    chunk, lane, inside = _line(row, tl.program_id(1) * J, J, LANES, PARTS, K)
    ok = inside & (lines < rows)
    for part in tl.static_range(PARTS):
        column = chunk * (LANES * PARTS) + part * LANES + lane
        weights = unpacked(weight + row, chunk, lane, ok, part, TYPE)
        tl.store(out + lines.to(tl.int64) * K + column, weights.to(out.dtype.element_ty), mask=ok & (lane >= 0))
