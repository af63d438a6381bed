"""Weights in blocks of few bits, unpacked in registers; `repacking` makes their arrays of the blocks of GGUF files.

A group is 32 weights of a row in LANES lanes and PARTS parts: weight 4 * part + lane. What a thread loads at once are
the lanes of a group: of codes in 4 to 6 bits a word of each lane with 4 bits of all parts, of codes in 8 bits two words
with the bytes of four parts; `high` has the bits above the fourth of all parts of a lane, in a byte or two.

A code becomes a number without a conversion: its bits are those of the mantissa of a float32 from `_offset` on, whose
bits are an argument, because a constant would cost an instruction more.
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


@triton.constexpr_function
def _offset(kind):
    return 64.0 if kind == Q5_0 or kind == Q5_1 or kind == Q5_K or kind == Q6_K else 256.0


@triton.constexpr_function
def _step(part, kind):
    if kind == Q8_0:
        return 1.0
    if kind == Q4_0 or kind == Q4_1 or kind == Q4_K:
        return 16.0 if part % 2 else 1.0
    return 1.0 if part % 2 else 0.0625


@triton.constexpr_function
def _zero(kind):
    """The code of 0."""
    return 32.0 if kind == Q6_K else 128.0 if kind == Q8_0 else 16.0 if kind == Q5_0 else 8.0 if kind == Q4_0 else 0.0


def offset_bits(kind: int) -> int:
    """The bits of `_offset` in float32."""
    return 0x42800000 if _offset(kind) == 64.0 else 0x43800000


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
    """`_offset` + `_step` * code, in float32. Two parts share a shift."""
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
    step: tl.constexpr = _step(PART, TYPE)
    weights = raised(words[0], words[1], offset_bits, PART, TYPE)
    if EXACT:
        weights = ((weights - _offset(TYPE)) * (1.0 / step) - _zero(TYPE)) * scale[:, :, None] + minimum[:, :, None]
    else:
        minimum -= scale * (_offset(TYPE) / step + _zero(TYPE))
        weights = weights * (scale * (1.0 / step))[:, :, None] + minimum[:, :, None]
    return weights


@triton.jit
def _vector(x, norm, K: tl.constexpr, J: tl.constexpr, TILES: tl.constexpr, TYPE: tl.constexpr):
    """x [K] under the weights of a norm, for TILES tiles of J groups, and squares [1, J, 4].

    11 tensors of a tile: parts [1, J, 4] over their `_step`, and sums [1, J] of groups: what `raised` codes add, in the
    first 16 and the last 16 weights, and all.
    """
    lane = tl.arange(0, 4)[None, None, :]
    parts = ()
    squares = tl.zeros([1, J, 4], tl.float32)
    for tile in tl.static_range(TILES):
        group = tile * J + tl.arange(0, J)[None, :, None]
        ok = group < K // 32
        first_sum = tl.zeros([1, J, 4], tl.float32)
        last_sum = tl.zeros([1, J, 4], tl.float32)
        total = tl.zeros([1, J, 4], tl.float32)
        for part in tl.static_range(8):
            at = group * 32 + 4 * part + lane
            v = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
            if norm is not None:
                squares += v * v
                v *= tl.load(norm + at, mask=ok, other=0.0)
            total += v
            step = _step(part, TYPE)
            extra = v * (_offset(TYPE) / step + _zero(TYPE))
            if part < 4:
                first_sum += extra
            else:
                last_sum += extra
            parts += (v * (1.0 / step),)
        parts += (tl.sum(first_sum, 2), tl.sum(last_sum, 2), tl.sum(total, 2))
    return parts, squares


@triton.jit
def _tiles(codes, high, scales, batch, batches, K: tl.constexpr, J: tl.constexpr, TILES: tl.constexpr,
           TYPE: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """What is `loaded` of BN lines, five tensors of each tile."""
    line = (batch * BN + tl.arange(0, BN)).to(tl.int64)[:, None]
    words = ()
    for tile in tl.static_range(TILES):
        group = tile * J + tl.arange(0, J)[None, :]
        words += loaded(codes, high, scales, line, group, (group < K // 32) & (batch < batches), K // 32, TYPE)
    return words


@triton.jit
def _vectors(x, norm, eps, M: tl.constexpr, K: tl.constexpr, J: tl.constexpr, TILES: tl.constexpr, TYPE: tl.constexpr):
    """The tensors of each of M vectors [M, K], and its factor of the norm."""
    parts, factors = (), ()
    for row in tl.static_range(M):
        more, squares = _vector(x + row * K, norm, K, J, TILES, TYPE)
        parts += more
        if norm is not None:
            factors += (1.0 / tl.sqrt(tl.sum(tl.sum(tl.sum(squares, 2), 1), 0) / K + eps),)
        else:
            factors += (1.0,)
    return parts, factors


@triton.jit
def _sums(parts, TILE: tl.constexpr):
    """The sums of a tile of a vector, see `_vector`."""
    return parts[11 * TILE + 8], parts[11 * TILE + 9], parts[11 * TILE + 10]


@triton.jit
def _dot(words, parts, factors, offset_bits, M: tl.constexpr, J: tl.constexpr, TILES: tl.constexpr,
         TYPE: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Products [BN] of lines with each of M vectors, as if it were alone."""
    totals = ()
    for _ in tl.static_range(M):
        totals += (tl.zeros([BN, J], tl.float32),)
    for tile in tl.static_range(TILES):
        group = tile * J + tl.arange(0, J)[None, :]
        scale, last_scale, minimum = scales_of(
            words[5 * tile + 2], words[5 * tile + 3], words[5 * tile + 4], group, TYPE
        )
        accs = ()
        for _ in tl.static_range(M):
            accs += (tl.zeros([BN, J, 4], tl.float32),)
        for part in tl.static_range(8):
            code = raised(words[5 * tile], words[5 * tile + 1], offset_bits, part, TYPE)
            before, accs = accs, ()
            for row in tl.static_range(M):
                accs += (before[row] + code * parts[11 * (row * TILES + tile) + part],)
            if part == 7 or (part == 3 and TYPE == Q6_K):
                before, totals = totals, ()
                for row in tl.static_range(M):
                    sums = _sums(parts, row * TILES + tile)
                    if TYPE != Q6_K:
                        total = before[row] + scale * (tl.sum(accs[row], 2) - (sums[0] + sums[1]))
                    elif part == 3:
                        total = before[row] + scale * (tl.sum(accs[row], 2) - sums[0])
                    else:
                        total = before[row] + last_scale * (tl.sum(accs[row], 2) - sums[1])
                    if TYPE == Q4_1 or TYPE == Q5_1 or TYPE == Q4_K or TYPE == Q5_K:
                        total += minimum * sums[2]
                    totals += (total,)
                accs = ()
                for _ in tl.static_range(M):
                    accs += (tl.zeros([BN, J, 4], tl.float32),)
    products = ()
    for row in tl.static_range(M):
        products += (tl.sum(totals[row], 1) * factors[row],)
    return products


@triton.jit(do_not_specialize=["batches", "offset_bits"])
def blocks_gemv_kernel(
    x, codes, high, scales, second_codes, second_high, second_scales, bias, second_bias, norm, added, out, batches,
    stride, offset_bits, eps, scale, add_scale, M: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, TYPE: tl.constexpr, J: tl.constexpr, TILES: tl.constexpr, BN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As `gemv_kernel`, of one matrix in blocks or of gates and a second one.

    Program: the vectors in registers, with a group or more for a thread, and some of the batches of BN lines.
    """
    if PDL:
        gdc_launch_dependents()
    begin = tl.program_id(0)
    ahead = _tiles(codes, high, scales, begin, batches, K, J, TILES, TYPE, BN)
    if GATED:
        second_ahead = _tiles(second_codes, second_high, second_scales, begin, batches, K, J, TILES, TYPE, BN)
    if PDL:
        gdc_wait()
    parts, factors = _vectors(x, norm, eps, M, K, J, TILES, TYPE)
    for batch in range(begin, batches, tl.num_programs(0)):
        lines = batch * BN + tl.arange(0, BN)
        words = ahead
        after = batch + tl.num_programs(0)
        ahead = _tiles(codes, high, scales, after, batches, K, J, TILES, TYPE, BN)
        products = _dot(words, parts, factors, offset_bits, M, J, TILES, TYPE, BN)
        if GATED:
            words = second_ahead
            second_ahead = _tiles(second_codes, second_high, second_scales, after, batches, K, J, TILES, TYPE, BN)
            ups = _dot(words, parts, factors, offset_bits, M, J, TILES, TYPE, BN)
        for row in tl.static_range(M):
            y = products[row]
            if bias is not None:
                y += tl.load(bias + lines)
            if GATED:
                up = ups[row]
                if second_bias is not None:
                    up += tl.load(second_bias + lines)
                y = activated(y, ACTIVATION) * up
            finish(y, row * stride + lines, added, out, scale, add_scale, -1 if GATED else ACTIVATION)


@triton.jit(do_not_specialize=["offset_bits"])
def blocks_rows_kernel(
    x, codes, high, scales, bias, out, rows, lines_count, offset_bits, scale, K: tl.constexpr, TYPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """out [rows, lines_count] = scale * (x [rows, K] @ W' + bias), for at most BM rows; program: BN lines of blocks."""
    lines = tl.program_id(0) * BN + tl.arange(0, BN)
    number, within = tl.arange(0, BM), tl.arange(0, J * 4)
    line, real = lines.to(tl.int64)[:, None], (lines < lines_count)[:, None]
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
        acc += tl.load(bias + lines, mask=lines < lines_count, other=0.0)[None, :]
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
