"""Weights in blocks of few bits, unpacked in registers; `repacking` makes their arrays of the blocks of GGUF files.

A group is 32 weights of a row in LANES lanes and PARTS parts: weight 4 * part + lane. What a thread loads at once are
the lanes of a group: of codes in 4 to 6 bits a word of each lane with 4 bits of all parts, of codes in 8 bits two words
with the bytes of four parts; `high` has the bits above the fourth of all parts of a lane, in a byte or two.

A code becomes a number without a conversion: its bits are those of the mantissa of a float32 from `code_offset` on,
whose bits are an argument, because a constant would cost an instruction more.
"""

import triton
import triton.language as tl

from h2o_stream.native.gguf_types import TensorType

Q4_0 = tl.constexpr(int(TensorType.Q4_0))
Q4_1 = tl.constexpr(int(TensorType.Q4_1))
Q5_0 = tl.constexpr(int(TensorType.Q5_0))
Q5_1 = tl.constexpr(int(TensorType.Q5_1))
Q8_0 = tl.constexpr(int(TensorType.Q8_0))
Q4_K = tl.constexpr(int(TensorType.Q4_K))
Q5_K = tl.constexpr(int(TensorType.Q5_K))
Q6_K = tl.constexpr(int(TensorType.Q6_K))


@triton.constexpr_function
def code_offset(kind):
    """What `raised` codes are above."""
    return 64.0 if kind == Q5_0 or kind == Q5_1 or kind == Q5_K or kind == Q6_K else 256.0


@triton.constexpr_function
def code_step(part, kind):
    """How far apart raised codes of a part are."""
    if kind == Q8_0:
        return 1.0
    if kind == Q4_0 or kind == Q4_1 or kind == Q4_K:
        return 16.0 if part % 2 else 1.0
    return 1.0 if part % 2 else 0.0625


@triton.constexpr_function
def zero_code(kind):
    """The code of 0."""
    return 32.0 if kind == Q6_K else 128.0 if kind == Q8_0 else 16.0 if kind == Q5_0 else 8.0 if kind == Q4_0 else 0.0


def offset_bits(kind: int) -> int:
    """The bits of `code_offset` in float32."""
    return 0x42800000 if code_offset(kind) == 64.0 else 0x43800000


@triton.jit
def one_of(line, second_line, third_line, first, second, third):
    """What there is for the matrix with a line, of up to three below each other, the others of which begin at these."""
    if second is not None:
        first = tl.where(line >= second_line, second, first)
    if third is not None:
        first = tl.where(line >= third_line, third, first)
    return first


@triton.jit
def loaded(codes, high, scales, line, group, ok, GROUPS: tl.constexpr, TYPE: tl.constexpr):
    """What there is of groups [1, J] of lines [BN, 1] int64 with so many groups: words and bits above those [BN, J, 4],
    and the three [BN, J] that `scales_of` takes.
    """
    lane, wide = tl.arange(0, 4)[None, None, :], ok[:, :, None]
    if TYPE == Q8_0:
        at = (line * (2 * GROUPS) + group)[:, :, None] * 4 + lane
        first = tl.load(codes + at, mask=wide, other=0)
        second = tl.load(codes + 4 * GROUPS + at, mask=wide, other=0)
    else:
        at = (line * GROUPS + group)[:, :, None] * 4 + lane
        first = tl.load(codes + at, mask=wide, other=0)
        second = first
        if high is not None:
            second = tl.load(high + at, mask=wide, other=0).to(tl.int32)
    if TYPE == Q4_K or TYPE == Q5_K:
        block = scales + line * (GROUPS // 2) + group // 8 * 4
        number = tl.load(block, mask=ok, other=0)
        within = block.to(tl.pointer_type(tl.uint8)) + 4
        six = tl.load(within + group % 8, mask=ok, other=0).to(tl.int32)
        four = tl.load(within + 8 + group % 8 // 2, mask=ok, other=0).to(tl.int32)
    elif TYPE == Q6_K:
        block = scales + line * (GROUPS // 8 * 9) + group // 8 * 9
        number = tl.load((block + 8).to(tl.pointer_type(tl.float16)), mask=ok, other=0.0)
        six = tl.load(block + group % 8, mask=ok, other=0).to(tl.int32)
        four = six
    else:
        number = tl.load(scales + line * GROUPS + group, mask=ok, other=0)
        six, four = number, number
    return first, second, number, six, four


@triton.jit
def _half(bits):
    """The float16 in the lower two bytes."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scales_of(number, six, four, group, TYPE: tl.constexpr):
    """Scales of the first and second 16 weights of groups, and what is added to all, float32."""
    if TYPE == Q4_K or TYPE == Q5_K:
        scale = _half(number) * (six & 63)
        minimum = -_half(number >> 16) * ((six >> 6) | ((four >> 4 * (group % 2)) & 15) << 2)
    elif TYPE == Q4_1 or TYPE == Q5_1:
        scale, minimum = _half(number), _half(number >> 16)
    else:
        scale = number.to(tl.float32)
        minimum = scale * 0.0
    second = scale
    if TYPE == Q6_K:
        second = scale * (six >> 8)
        scale *= ((six & 255) ^ 128) - 128
    return scale, second, minimum


@triton.jit
def _shifted(bits, LEFT: tl.constexpr):
    if LEFT < 0:
        bits = bits >> -LEFT
    else:
        bits = bits << LEFT
    return bits


@triton.jit
def raised(first, second, offset_bits, PART: tl.constexpr, TYPE: tl.constexpr):
    """`code_offset` + `code_step` * code, in float32. Two parts share a shift."""
    pair: tl.constexpr = PART // 2
    if TYPE == Q8_0:
        bits = _shifted(first if PART < 4 else second, 15 - 8 * (PART % 4)) & 0x7F8000
    elif TYPE == Q4_0 or TYPE == Q4_1 or TYPE == Q4_K:
        bits = _shifted(first, 15 - 8 * pair) & (0x780000 if PART % 2 else 0x78000)
    else:
        bits = _shifted(first, 13 - 8 * pair) & (0x1E0000 if PART % 2 else 0x1E000)
        if TYPE == Q6_K:
            above = (second << (17 - 2 * pair - pair // 2 * 4)) & (0x600000 if PART % 2 else 0x60000)
        else:
            above = (second << (17 - pair)) & (0x200000 if PART % 2 else 0x20000)
        offset_bits ^= above  # two instructions; | again would be three
    return (bits | offset_bits).to(tl.float32, bitcast=True)


@triton.jit
def unpacked(words, group, offset_bits, PART: tl.constexpr, TYPE: tl.constexpr, EXACT: tl.constexpr):
    """The weights [BN, J, 4] of a part of what was loaded; unless they are EXACT, up to 2^-16 of their scale."""
    scale, second, minimum = scales_of(words[2], words[3], words[4], group, TYPE)
    if PART >= 4:
        scale = second
    step: tl.constexpr = code_step(PART, TYPE)
    weights = raised(words[0], words[1], offset_bits, PART, TYPE)
    if EXACT:
        weights = ((weights - code_offset(TYPE)) * (1.0 / step) - zero_code(TYPE)) * scale[:, :, None] + minimum[
            :, :, None
        ]
    else:
        minimum -= scale * (code_offset(TYPE) / step + zero_code(TYPE))
        weights = weights * (scale * (1.0 / step))[:, :, None] + minimum[:, :, None]
    return weights


@triton.jit(do_not_specialize=["second_line", "third_line", "offset_bits"])
def blocks_rows_kernel(
    x, codes, high, scales, second_codes, second_high, second_scales, third_codes, third_high, third_scales, bias,
    second_bias, third_bias, out, rows, lines_count, second_line, third_line, offset_bits, scale, K: tl.constexpr,
    TYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """out [rows, lines_count] = scale * (x [rows, K] @ W' + bias), for at most BM rows; program: BN lines of blocks.

    W are up to three matrices below each other; the second and the third begin at these lines, multiples of BN.
    """
    begin = tl.program_id(0) * BN
    lines = begin + tl.arange(0, BN)
    first = one_of(begin, second_line, third_line, 0, second_line, third_line)
    codes = one_of(begin, second_line, third_line, codes, second_codes, third_codes)
    high = one_of(begin, second_line, third_line, high, second_high, third_high)
    scales = one_of(begin, second_line, third_line, scales, second_scales, third_scales)
    number, within = tl.arange(0, BM), tl.arange(0, J * 4)
    line, real = (lines - first).to(tl.int64)[:, None], (lines < lines_count)[:, None]
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K // 32, J):
        group = start + tl.arange(0, J)[None, :]
        words = loaded(codes, high, scales, line, group, real & (group < K // 32), K // 32, TYPE)
        for part in tl.static_range(8):
            column = (start + within // 4) * 32 + 4 * part + within % 4
            v = tl.load(x + number[:, None] * K + column[None, :],
                        mask=(number < rows)[:, None] & (column < K)[None, :], other=0.0)  # fmt: skip
            weights = tl.reshape(unpacked(words, group, offset_bits, part, TYPE, False).to(v.dtype), [BN, J * 4])
            acc = tl.dot(v, tl.trans(weights), acc)
    there = (number < rows)[:, None] & (lines < lines_count)[None, :]
    if bias is not None:
        biases = one_of(begin, second_line, third_line, bias, second_bias, third_bias)
        acc += tl.load(biases + lines - first, mask=lines < lines_count, other=0.0)[None, :]
    tl.store(out + number[:, None] * lines_count + lines[None, :], (acc * scale).to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["count", "offset_bits"])
def unpack_kernel(codes, high, scales, ids, out, count, offset_bits, K: tl.constexpr, TYPE: tl.constexpr,
                  BN: tl.constexpr, J: tl.constexpr):  # fmt: skip
    """out [count, K] of the rows `ids` [count] int64; program: BN of these, J groups."""
    number = tl.program_id(0) * BN + tl.arange(0, BN)
    line = tl.load(ids + number, mask=number < count, other=0)[:, None]
    group, lane = tl.program_id(1) * J + tl.arange(0, J)[None, :], tl.arange(0, 4)[None, None, :]
    ok = (number < count)[:, None] & (group < K // 32)
    words = loaded(codes, high, scales, line, group, ok, K // 32, TYPE)
    row = out + (number.to(tl.int64)[:, None] * K + group * 32)[:, :, None]
    for part in tl.static_range(8):
        weights = unpacked(words, group, offset_bits, part, TYPE, True)
        tl.store(row + 4 * part + lane, weights.to(out.dtype.element_ty), mask=ok[:, :, None] & (lane >= 0))
