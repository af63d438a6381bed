"""Products of matrices in blocks with few vectors, which stay in registers, each as if it were alone."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from h2o_stream.gpu.blocks import (
    Q4_1,
    Q4_K,
    Q5_1,
    Q5_K,
    Q6_K,
    code_offset,
    code_step,
    loaded,
    one_of,
    raised,
    scales_of,
    zero_code,
)
from h2o_stream.gpu.products import activated, finish


@triton.jit
def _vector(x, norm, K: tl.constexpr, J: tl.constexpr, TILES: tl.constexpr, TYPE: tl.constexpr):
    """x [K] under the weights of a norm, for TILES tiles of J groups, and squares [1, J, 4].

    11 tensors of a tile: parts [1, J, 4] over their `code_step`, and sums [1, J] of groups: what `raised` codes add, in
    the first 16 and the last 16 weights, and all.
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
            step = code_step(part, TYPE)
            extra = v * (code_offset(TYPE) / step + zero_code(TYPE))
            if part < 4:
                first_sum += extra
            else:
                last_sum += extra
            parts += (v * (1.0 / step),)
        parts += (tl.sum(first_sum, 2), tl.sum(last_sum, 2), tl.sum(total, 2))
    return parts, squares


@triton.jit
def _tiles(arrays, second_line, third_line, batch, batches, K: tl.constexpr, J: tl.constexpr, TILES: tl.constexpr,
           TYPE: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """What is `loaded` of BN lines of up to three matrices, whose arrays these are; five tensors of each tile."""
    line = batch * BN
    start = one_of(line, second_line, third_line, 0, second_line, third_line)
    codes = one_of(line, second_line, third_line, arrays[0], arrays[3], arrays[6])
    high = one_of(line, second_line, third_line, arrays[1], arrays[4], arrays[7])
    scales = one_of(line, second_line, third_line, arrays[2], arrays[5], arrays[8])
    line = (line - start + tl.arange(0, BN)).to(tl.int64)[:, None]
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


@triton.jit(do_not_specialize=["batches", "second_line", "third_line", "offset_bits"])
def blocks_gemv_kernel(
    x, codes, high, scales, second_codes, second_high, second_scales, third_codes, third_high, third_scales, bias,
    second_bias, third_bias, norm, added, out, batches, second_line, third_line, stride, offset_bits, eps, scale,
    add_scale, M: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, TYPE: tl.constexpr,
    J: tl.constexpr, TILES: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `gemv_kernel`, of matrices in blocks that begin at these lines, or of gates and a second one.

    Program: the vectors in registers, with a group or more for a thread, and some of the batches of BN lines.
    """
    if PDL:
        gdc_launch_dependents()
    begin = tl.program_id(0)
    if GATED:
        arrays = (codes, high, scales, None, None, None, None, None, None)
        ups = (second_codes, second_high, second_scales, None, None, None, None, None, None)
        ups_ahead = _tiles(ups, second_line, third_line, begin, batches, K, J, TILES, TYPE, BN)
    else:
        arrays = (codes, high, scales, second_codes, second_high, second_scales, third_codes, third_high, third_scales)
    ahead = _tiles(arrays, second_line, third_line, begin, batches, K, J, TILES, TYPE, BN)
    if PDL:
        gdc_wait()
    parts, factors = _vectors(x, norm, eps, M, K, J, TILES, TYPE)
    for batch in range(begin, batches, tl.num_programs(0)):
        lines = batch * BN + tl.arange(0, BN)
        words = ahead
        after = batch + tl.num_programs(0)
        ahead = _tiles(arrays, second_line, third_line, after, batches, K, J, TILES, TYPE, BN)
        products = _dot(words, parts, factors, offset_bits, M, J, TILES, TYPE, BN)
        if GATED:
            words = ups_ahead
            ups_ahead = _tiles(ups, second_line, third_line, after, batches, K, J, TILES, TYPE, BN)
            factors_of_gates = _dot(words, parts, factors, offset_bits, M, J, TILES, TYPE, BN)
        for row in tl.static_range(M):
            y = products[row]
            if bias is not None:
                start = one_of(batch * BN, second_line, third_line, 0, second_line, third_line)
                biases = bias if GATED else one_of(batch * BN, second_line, third_line, bias, second_bias, third_bias)
                y += tl.load(biases + lines - start)
            if GATED:
                up = factors_of_gates[row]
                if second_bias is not None:
                    up += tl.load(second_bias + lines)
                y = activated(y, ACTIVATION) * up
            finish(y, row * stride + lines, added, out, scale, add_scale, -1 if GATED else ACTIVATION)
