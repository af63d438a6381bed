"""Mixtures of experts: which ones a token goes through, and their products.

What depends on the choice stays on the device: a grid has a program for every block of pairs, of a token and one of its
experts, that there can be, and no shape depends on data. Few rows read the matrices of an expert once for each pair, as
if each row were alone; more rows are sorted by expert and read them once for up to BM of its pairs.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from h2o_stream.gpu.blocks import loaded, unpacked
from h2o_stream.gpu.products import activated, finish, gated


@triton.jit
def _without_groups(worth, group, GROUPS: tl.constexpr, DROPPED: tl.constexpr, BEST_TWO: tl.constexpr):
    """Worths of experts, less those of so many of the groups that are worth least, by their best expert or two."""
    of_groups = worth
    for number in tl.static_range(GROUPS):
        of_group = tl.where(group == number, worth, float("-inf"))
        best = tl.max(of_group, 0)
        if BEST_TWO:
            place = tl.arange(0, worth.shape[0])
            best += tl.max(tl.where(place == tl.argmax(of_group, 0), float("-inf"), of_group), 0)
        of_groups = tl.where(group == number, best, of_groups)
    for _ in tl.static_range(DROPPED):
        lowest = tl.min(tl.where(worth > float("-inf"), of_groups, float("inf")), 0)
        last = tl.max(tl.where((worth > float("-inf")) & (of_groups == lowest), group, -1), 0)
        worth = tl.where(group == last, float("-inf"), worth)
    return worth


@triton.jit
def route_kernel(logits, bias, factors, chosen, weights, scale, E: tl.constexpr, CHOSEN: tl.constexpr,
                 EP: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZED: tl.constexpr, GROUPS: tl.constexpr,
                 DROPPED: tl.constexpr, BEST_TWO: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """The CHOSEN experts of each row, int32, and their weights, of E logits; see `native.experts.Router`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    expert = tl.arange(0, EP)
    ok = expert < E
    logit = tl.load(logits + row * E + expert, mask=ok, other=float("-inf"))
    if SIGMOID:
        score = tl.sigmoid(logit)
    else:
        score = tl.exp(logit - tl.max(logit, 0))
        score = score / tl.sum(score, 0)
    worth = score
    if bias is not None:
        worth += tl.load(bias + expert, mask=ok, other=0.0)
    worth = tl.where(ok, worth, float("-inf"))
    if GROUPS:
        worth = _without_groups(worth, expert // (E // GROUPS), GROUPS, DROPPED, BEST_TWO)
    total = 1.0
    if NORMALIZED:
        left = worth
        total = tl.sum(score * 0.0, 0)
        for _ in tl.static_range(CHOSEN):
            best = tl.argmax(left, 0)
            total += tl.sum(tl.where(expert == best, score, 0.0), 0)
            left = tl.where(expert == best, float("-inf"), left)
    for number in tl.static_range(CHOSEN):
        best = tl.argmax(worth, 0)
        weight = tl.sum(tl.where(expert == best, score, 0.0), 0) * scale / total
        if factors is not None:
            weight *= tl.load(factors + best)
        tl.store(chosen + row * CHOSEN + number, best)
        tl.store(weights + row * CHOSEN + number, weight)
        worth = tl.where(expert == best, float("-inf"), worth)


@triton.jit
def _products(acc, gates, GATED: tl.constexpr, ACTIVATION: tl.constexpr, PARAMETERS: tl.constexpr):
    """Products under an activation, or times gates under it."""
    if GATED:
        acc = gated(gates, acc, ACTIVATION, PARAMETERS)
    elif ACTIVATION >= 0:
        acc = activated(acc, ACTIVATION)
    return acc


@triton.jit
def experts_kernel(x, gate, up, gate_bias, bias, chosen, weights, norm, out, stride, eps, N: tl.constexpr,
                   K: tl.constexpr, CHOSEN: tl.constexpr, ACTIVATION: tl.constexpr, PARAMETERS: tl.constexpr,
                   LINE: tl.constexpr, COLUMN: tl.constexpr, TURNS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    """out [pairs, N] = activation(gate @ v) * (up @ v) for the row v of each pair, of experts `stride` rows apart.

    Rows of x [*, K] are under an RMS norm if there are weights for one, and times `weights` [pairs] if there are some;
    without gates out = activation(up @ v). Numbers of a matrix are LINE and COLUMN apart; with TURNS every other line
    of `up` is a gate, the first one, too. Program: BN lines of a pair.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(1)
    x += pair // CHOSEN * K
    SIZE: tl.constexpr = BN * (1 + TURNS)
    lines = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    cols = tl.arange(0, BK)
    first = tl.load(chosen + pair).to(tl.int64) * stride
    row = first * K + lines * LINE
    acc, gates = tl.zeros([SIZE, BK], tl.float32), tl.zeros([SIZE, BK], tl.float32)
    squares = tl.zeros([BK], tl.float32)
    for k in tl.static_range(0, K, BK):
        ok = k + cols < K
        v = tl.load(x + k + cols, mask=ok, other=0.0).to(tl.float32)
        if norm is not None:
            squares += v * v
            v *= tl.load(norm + k + cols, mask=ok, other=0.0)
        at = row[:, None] + (k + cols)[None, :] * COLUMN
        acc += tl.load(up + at, mask=ok[None, :], other=0.0).to(tl.float32) * v[None, :]
        if gate is not None:
            gates += tl.load(gate + at, mask=ok[None, :], other=0.0).to(tl.float32) * v[None, :]
    factor = 1.0
    if norm is not None:
        factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)
    if weights is not None:
        factor *= tl.load(weights + pair)
    y, of_gates = tl.sum(acc, 1) * factor, tl.sum(gates, 1) * factor
    if bias is not None:
        y += tl.load(bias + first + lines)
    if gate_bias is not None:
        of_gates += tl.load(gate_bias + first + lines)
    if TURNS:
        of_gates, y = tl.split(tl.reshape(y, [BN, 2]))
    y = _products(y, of_gates, TURNS or gate is not None, ACTIVATION, PARAMETERS)
    tl.store(out + pair * N + tl.program_id(0) * BN + tl.arange(0, BN), y.to(out.dtype.element_ty))


@triton.jit
def experts_out_kernel(inner, down, bias, chosen, weights, added, out, add_scale, N: tl.constexpr, K: tl.constexpr,
                       CHOSEN: tl.constexpr, LINE: tl.constexpr, COLUMN: tl.constexpr, BN: tl.constexpr,
                       BK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """out [rows, N] = the sum of down @ inner [pairs, K] of a row's experts, times `weights` if any; and `added`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1)
    lines = tl.program_id(0) * BN + tl.arange(0, BN)
    cols = tl.arange(0, BK)
    acc, biases = tl.zeros([BN, BK], tl.float32), tl.zeros([BN], tl.float32)
    for pair in range(row * CHOSEN, row * CHOSEN + CHOSEN):
        first = tl.load(chosen + pair).to(tl.int64) * N
        line = first * K + lines * LINE
        weight = 1.0
        if weights is not None:
            weight = tl.load(weights + pair)
        if bias is not None:
            biases += tl.load(bias + first + lines) * weight
        for k in tl.static_range(0, K, BK):
            ok = k + cols < K
            v = tl.load(inner + pair * K + k + cols, mask=ok, other=0.0).to(tl.float32) * weight
            at = line[:, None] + (k + cols)[None, :] * COLUMN
            acc += tl.load(down + at, mask=ok[None, :], other=0.0).to(tl.float32) * v
    finish(tl.sum(acc, 1) + biases, row * N + lines, added, out, 1.0, add_scale, -1)


@triton.jit(do_not_specialize=["pairs"])
def sort_kernel(chosen, order, starts, pairs, BP: tl.constexpr, PDL: tl.constexpr):
    """The pairs of each expert one after another, in order, and where they start, [E + 1]; program: an expert, or E."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert, place = tl.program_id(0), tl.arange(0, BP)
    before = 0
    for at in range(0, pairs, BP):
        other = tl.load(chosen + at + place, mask=at + place < pairs, other=expert)
        before += tl.sum((other < expert).to(tl.int32), 0)
    tl.store(starts + expert, before)
    for at in range(0, pairs, BP):
        mine = (tl.load(chosen + at + place, mask=at + place < pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + before + tl.cumsum(mine, 0) - 1, at + place, mask=mine > 0)
        before += tl.sum(mine, 0)


@triton.jit
def _block(order, starts, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr):
    """The expert of a program, or E, and [BM] pairs of it, of which some are there.

    Without `starts` a program has one pair, and `order` is the experts of pairs.
    """
    block, number = tl.program_id(0), tl.arange(0, EP)
    if starts is None:
        expert, place = tl.load(order + block), block + tl.arange(0, BM)
        real = place == block
        pair = place
    else:
        start = tl.load(starts + number, mask=number < E, other=0)
        end = tl.load(starts + 1 + number, mask=number < E, other=0)
        blocks = (end - start + BM - 1) // BM
        within = block - (tl.cumsum(blocks, 0) - blocks)
        mine = (within >= 0) & (within < blocks)
        expert = tl.min(tl.where(mine, number, E), 0)
        place = tl.sum(tl.where(mine, start + within * BM, 0), 0) + tl.arange(0, BM)
        real = place < tl.sum(tl.where(mine, end, 0), 0)
        pair = tl.load(order + place, mask=real, other=0)
    return expert.to(tl.int64), pair.to(tl.int64), real


@triton.jit
def grouped_kernel(
    x, gate, weight, gate_bias, bias, weights, order, starts, out, stride, E: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, CHOSEN: tl.constexpr, ACTIVATION: tl.constexpr, PARAMETERS: tl.constexpr, LINE: tl.constexpr,
    COLUMN: tl.constexpr, TURNS: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `experts_kernel`, of pairs in an `order` whose `starts` are those of experts; row: pair // CHOSEN.

    ACTIVATION -1 is none. Program: BM pairs of an expert, if there are as many blocks of them, and BN lines.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert, pair, real = _block(order, starts, E, EP, BM)
    if expert < E:
        SIZE: tl.constexpr = BN * (1 + TURNS)
        lines, cols = tl.program_id(1) * SIZE + tl.arange(0, SIZE), tl.arange(0, BK)
        there = lines < N * (1 + TURNS)
        source = (pair // CHOSEN * K)[:, None] + cols[None, :]
        line = (expert * stride * K + lines * LINE)[None, :] + (cols * COLUMN)[:, None]
        acc, gates = tl.zeros([BM, SIZE], tl.float32), tl.zeros([BM, SIZE], tl.float32)
        for k in range(0, K, BK):
            ok = (k + cols < K)[:, None] & there[None, :]
            v = tl.load(x + source + k, mask=real[:, None] & (k + cols < K)[None, :], other=0.0)
            w = tl.load(weight + line + k * COLUMN, mask=ok, other=0.0).to(v.dtype)
            acc = tl.dot(v, w, acc, input_precision=PRECISION)
            if gate is not None:
                w = tl.load(gate + line + k * COLUMN, mask=ok, other=0.0).to(v.dtype)
                gates = tl.dot(v, w, gates, input_precision=PRECISION)
        if weights is not None:
            factor = tl.load(weights + pair, mask=real, other=0.0)[:, None]
            acc, gates = acc * factor, gates * factor
        if bias is not None:
            acc += tl.load(bias + expert * stride + lines, mask=there, other=0.0)[None, :]
        if gate_bias is not None:
            gates += tl.load(gate_bias + expert * stride + lines, mask=there, other=0.0)[None, :]
        if TURNS:
            gates, acc = tl.split(tl.reshape(acc, [BM, BN, 2]))
        _store(_products(acc, gates, TURNS or gate is not None, ACTIVATION, PARAMETERS), pair, real, out, N, BN)


@triton.jit
def _store(y, pair, real, out, N: tl.constexpr, BN: tl.constexpr):
    """Store products [BM, BN]."""
    lines = tl.program_id(1) * BN + tl.arange(0, BN)
    there = real[:, None] & (lines < N)[None, :]
    tl.store(out + (pair * N)[:, None] + lines[None, :], y.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["offset_bits", "gate_offset_bits"])
def grouped_blocks_kernel(
    x, gate_codes, gate_high, gate_scales, codes, high, scales, norm, order, starts, out, eps, gate_offset_bits,
    offset_bits, E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, CHOSEN: tl.constexpr, ACTIVATION: tl.constexpr,
    PARAMETERS: tl.constexpr, GATE_TYPE: tl.constexpr, TYPE: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, J: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `grouped_kernel`, of matrices in blocks, whose experts follow one another; and of rows under an RMS norm."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert, pair, real = _block(order, starts, E, EP, BM)
    if expert < E:
        lines, place = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, J * 4)
        line, there = (expert * N + lines)[:, None], (lines < N)[:, None]
        acc, gates = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
        squares = tl.zeros([BM], tl.float32)
        for start in range(0, K // 32, J):
            group = start + tl.arange(0, J)[None, :]
            ok = there & (group < K // 32)
            words = loaded(codes, high, scales, line, group, ok, K // 32, TYPE)
            if gate_codes is not None:
                gate_words = loaded(gate_codes, gate_high, gate_scales, line, group, ok, K // 32, GATE_TYPE)
            for part in tl.static_range(8):
                column = (start + place // 4) * 32 + 4 * part + place % 4
                v = tl.load(x + (pair // CHOSEN * K)[:, None] + column[None, :],
                            mask=real[:, None] & (column < K)[None, :], other=0.0)  # fmt: skip
                if norm is not None:
                    wide = v.to(tl.float32)
                    squares += tl.sum(wide * wide, 1)
                    v = (wide * tl.load(norm + column, mask=column < K, other=0.0)[None, :]).to(v.dtype)
                w = unpacked(words, group, offset_bits, part, TYPE, False).to(v.dtype)
                acc = tl.dot(v, tl.trans(tl.reshape(w, [BN, J * 4])), acc, input_precision=PRECISION)
                if gate_codes is not None:
                    w = unpacked(gate_words, group, gate_offset_bits, part, GATE_TYPE, False).to(v.dtype)
                    gates = tl.dot(v, tl.trans(tl.reshape(w, [BN, J * 4])), gates, input_precision=PRECISION)
        if norm is not None:
            factor = (1.0 / tl.sqrt(squares / K + eps))[:, None]
            acc, gates = acc * factor, gates * factor
        _store(_products(acc, gates, gate_codes is not None, ACTIVATION, PARAMETERS), pair, real, out, N, BN)


@triton.jit
def sum_kernel(products, weights, added, out, N: tl.constexpr, CHOSEN: tl.constexpr, BN: tl.constexpr,
               PDL: tl.constexpr):  # fmt: skip
    """out [rows, N] = the sum of the products [pairs, N] of a row's experts, times `weights` if any; and `added`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros([BN], tl.float32)
    if added is not None:
        total += tl.load(added + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    for number in tl.static_range(CHOSEN):
        y = tl.load(products + (row * CHOSEN + number) * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        if weights is not None:
            y *= tl.load(weights + row * CHOSEN + number)
        total += y
    tl.store(out + row * N + cols, total.to(out.dtype.element_ty), mask=cols < N)
