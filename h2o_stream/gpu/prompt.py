"""Attention, scores and eviction for a whole prompt: one launch for a head group, which walks the chunks in order."""

import triton
import triton.language as tl

from h2o_stream.gpu.few_bits import quantize_chunk
from h2o_stream.gpu.rotated import products, rotate
from h2o_stream.gpu.rules import BOOKKEEPING, LOG2E, NONE, TOVA, capped, distance_of, oldest_seen, worth_of

EMPTY = tl.constexpr(-3.4028234e38)
"""Worth of an empty slot: below that of every token, above that of no token."""


@triton.jit
def meet(arrived, count, SPLIT: tl.constexpr):
    """Wait for the other threads; with SPLIT also until programs have arrived `count` times. Writes before are seen."""
    tl.debug_barrier()
    if SPLIT:
        there = tl.atomic_add(arrived, 1, sem="acq_rel") + 1
        while there < count:
            there = tl.atomic_add(arrived, 0, sem="acq_rel")
        tl.debug_barrier()


@triton.jit(do_not_specialize=["tokens", "offset", "step", *BOOKKEEPING])
def prompt_kernel(
    query, key, value, out, heads, counts, limits, keys, values, scores, longs, index, rank, free, seen, table, pins,
    transient, sink_logits, key_range, turned, asked, shared, floats, whole, ranges, arrived,
    query_row, query_token, query_head, key_row, key_token, key_head, value_row, value_token, value_head, out_row,
    out_token, out_head,
    tokens, offset, step, slots, table_rows, pin_count, transient_count, recent, sinks, span, scale, softcap, decay,
    long_decay, long_weight, far, seed, layer, sliding, factor,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, R: tl.constexpr, HP: tl.constexpr,
    TP: tl.constexpr, VP: tl.constexpr, C: tl.constexpr, WP: tl.constexpr, WC: tl.constexpr, P: tl.constexpr,
    POLICY: tl.constexpr, POSITIONS: tl.constexpr, LONG: tl.constexpr, SOFTCAP: tl.constexpr, SLIDING: tl.constexpr,
    SPLIT: tl.constexpr, SHARE: tl.constexpr, PRECISION: tl.constexpr, BITS: tl.constexpr, SINKS: tl.constexpr,
    RING: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """`tokens` of each row, or `counts` [B] of them, `step` after `step`: each chunk attends to the slots and itself,
    then of both the S - 1 most worthy stay, or as many as `limits` [B, chunks] int32 says. Row b's tokens begin
    `offset` after the seen [B] ones.

    Program (row and KV head), or with SPLIT (row and KV head, query head of its group): those of a KV head exchange
    what their queries paid, wait for each other, and then evict the same; all of them have to fit on the GPU. With
    SHARE they rotate keys for each other as well.

    With few BITS, slots are those of `groups.decoded`; what codes stand for replaces keys and values after a chunk.

    Slots and dimensions are as in `decode_kernel`; places are slots beside the free one, which stays free. WP is at
    least their number, WC at least WP + C, C at least `step`; P places are multiplied at once, and fewer rotated, for
    which registers suffice. A chunk and what it holds are DT numbers a head in memory. Memory of a KV head: shared [2,
    G, 2 WP + C], ranges [2, D] float32, arrived int32, zero before the launch. Of a program: turned [WP + C, DT],
    asked [C, DT], floats [3 WP + 2 C] (scores, long-term scores, worths, the chunk's scores), whole [4 WP + C] int32
    (token indices, ranks, lists).
    """
    ROTATE: tl.constexpr = R > 0
    TAIL: tl.constexpr = D > R
    DT: tl.constexpr = 2 * HP * ROTATE + TP * TAIL
    TURNED: tl.constexpr = min(P, 64)
    pid = tl.program_id(0)
    row, head = pid // H, pid % H
    source = head.to(tl.int64)
    if heads is not None:
        source = tl.load(heads + head)
    kind: tl.constexpr = turned.dtype.element_ty
    last = tokens
    if counts is not None:
        last = tl.load(counts + row).to(tl.int32)
    query += row.to(tl.int64) * query_row
    key += row.to(tl.int64) * key_row + source * key_head
    value += row.to(tl.int64) * value_row + source * value_head
    out += row.to(tl.int64) * out_row
    hole = tl.load(free + pid).to(tl.int32)
    place, col = tl.arange(0, WP), tl.arange(0, C)
    every = tl.arange(0, WC)  # places, then tokens of the chunk, then nothing
    dims = tl.arange(0, VP)
    dims_ok = dims < DV
    inside = place < slots - 1
    base = pid.to(tl.int64) * slots
    at = pid * slots + place + (place >= hole).to(tl.int32)
    # What slots hold beside keys and values is in memory between the parts of a chunk: carried along in registers, it
    # would be spread like the products, many numbers a thread instead of one. Each program has a copy.
    member, members = 0, 1
    if SPLIT:
        member, members = tl.program_id(1), G
    program = (pid * members + member).to(tl.int64)
    floats += program * (3 * WP + 2 * C)
    whole += program * (4 * WP + C)
    asked += program * (C * DT)
    if SHARE:
        turned += pid.to(tl.int64) * ((WP + C) * DT)
    else:
        turned += program * ((WP + C) * DT)
    worths, arriving, lists = floats + 2 * WP, floats + 3 * WP + C, whole + 2 * WP
    arrived += pid
    tl.store(floats + place, tl.load(scores + at, mask=inside, other=0.0))
    if LONG:
        tl.store(floats + WP + place, tl.load(longs + at, mask=inside, other=0.0))
    tl.store(whole + place, tl.load(index + at, mask=inside, other=-1))
    tl.store(whole + WP + place, tl.load(rank + at, mask=inside, other=0).to(tl.int32))
    tl.debug_barrier()
    start = tl.load(seen + row) + offset

    meetings = 0
    chunk = 0
    begin = 0
    while begin < last:
        n = tl.minimum(step, last - begin)
        before = start + begin
        valid = col < n
        later = tl.maximum(n - 1 - col, 0)
        query_index = before + col

        # Rotate the keys: the newest token is at distance 0, the others are behind it.
        first, stride = 0, TURNED
        if SHARE:
            first, stride = member * TURNED, members * TURNED
        for piece in range(first, WP, stride):
            part = piece + tl.arange(0, TURNED)
            index_of = tl.load(whole + part)
            rank_of = tl.load(whole + WP + part) + n
            distance = distance_of(index_of, rank_of, before + n - 1, pins, pin_count, span, table_rows, POSITIONS)
            slot = pid * slots + part + (part >= hole).to(tl.int32)
            rotate(keys + slot.to(tl.int64) * D, turned + part * DT, index_of >= 0, distance, table, 1.0, R, D, HP,
                    TP, ROTATE, TAIL, kind)  # fmt: skip
        newest = turned + WP * DT
        rotates = member
        if SHARE:
            rotates = members - 1
        if member == rotates:
            rotate(key + (begin + col).to(tl.int64) * key_token, newest + col * DT, valid, later, table, factor, R, D,
                    HP, TP, ROTATE, TAIL, kind)  # fmt: skip
        if SHARE:
            meetings += 1
            meet(arrived, meetings * members, SPLIT)
        else:
            tl.debug_barrier()

        # Products have a line for each key and a column for each query: what a key is paid is the sum of a line, which
        # few threads share. What queries pay goes to one of two buffers, so that programs meet once a chunk.
        mine = shared + (pid * 2 + chunk % 2).to(tl.int64) * (G * (2 * WP + C))
        if POLICY == TOVA:
            weight = tl.where(col == n - 1, 1.0, 0.0)
        else:
            weight = tl.where(valid, tl.exp2(later * tl.log2(decay)), 0.0)
        long_weights = tl.where(valid, tl.exp2(later * tl.log2(long_decay)), 0.0)
        for g in range(member, G, members):
            of_query = query + (begin + col).to(tl.int64) * query_token + (source * G + g) * query_head
            rotate(of_query, asked + col * DT, valid, later, table, factor, R, D, HP, TP, ROTATE, TAIL, kind)
            tl.debug_barrier()
            low, rest = tl.arange(0, HP)[:, None], tl.arange(0, TP)[:, None]
            if ROTATE:
                q1 = tl.load(asked + (col * DT)[None, :] + low)
                q2 = tl.load(asked + (col * DT)[None, :] + HP + low)
            if TAIL:
                q3 = tl.load(asked + (col * DT)[None, :] + 2 * HP * ROTATE + rest)
            if not ROTATE:
                q1, q2 = q3, q3
            if not TAIL:
                q3 = q1
            b = products(newest, q1, q2, q3, C, DT, HP, TP, ROTATE, TAIL, PRECISION)
            b = capped(b * scale, softcap, SOFTCAP) * LOG2E
            sees = col[:, None] <= col[None, :]
            if SLIDING:
                sees &= query_index[:, None] >= oldest_seen(query_index, sliding, SLIDING)[None, :]
            b = tl.where(sees, b, NONE)
            top = tl.max(b, 0)
            if sink_logits is not None:
                sink = tl.load(sink_logits + source * G + g).to(tl.float32) * LOG2E
                top = tl.maximum(top, sink)
            total = tl.sum(tl.exp2(b - top[None, :]), 0)
            if sink_logits is not None:
                total += tl.exp2(sink - top)
            a = tl.zeros([P, C], tl.float32)
            for piece in range(0, WP, P):
                a = products(turned + piece * DT, q1, q2, q3, P, DT, HP, TP, ROTATE, TAIL, PRECISION)
                a = capped(a * scale, softcap, SOFTCAP) * LOG2E
                index_of = tl.load(whole + piece + tl.arange(0, P))
                seen_by = (index_of >= 0)[:, None] & valid[None, :]
                if SLIDING:
                    seen_by &= index_of[:, None] >= oldest_seen(query_index, sliding, SLIDING)[None, :]
                a = tl.where(seen_by, a, NONE)
                higher = tl.maximum(top, tl.max(a, 0))
                total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(a - higher[None, :]), 0)
                top = higher
            share = 1.0 / total
            b = tl.exp2(b - top[None, :]) * share[None, :]
            to = mine + g * (2 * WP + C)
            tl.store(to + 2 * WP + col, tl.sum(b * weight[None, :], 1))
            of_values = value + (begin + col)[:, None].to(tl.int64) * value_token + dims[None, :]
            new_value = tl.load(of_values, mask=valid[:, None] & dims_ok[None, :], other=0.0)
            o = tl.dot(tl.trans(b.to(kind)), new_value, input_precision=PRECISION)
            for piece in range(0, WP, P):
                part = piece + tl.arange(0, P)
                if WP > P:  # else there is one piece, and its products are what is needed
                    a = products(turned + piece * DT, q1, q2, q3, P, DT, HP, TP, ROTATE, TAIL, PRECISION)
                    a = capped(a * scale, softcap, SOFTCAP) * LOG2E
                    index_of = tl.load(whole + part)
                    seen_by = (index_of >= 0)[:, None] & valid[None, :]
                    if SLIDING:
                        seen_by &= index_of[:, None] >= oldest_seen(query_index, sliding, SLIDING)[None, :]
                    a = tl.where(seen_by, a, NONE)
                p = tl.exp2(a - top[None, :]) * share[None, :]
                tl.store(to + part, tl.sum(p * weight[None, :], 1))
                if LONG:
                    tl.store(to + WP + part, tl.sum(p * p * long_weights[None, :], 1))
                slot = (pid * slots + part + (part >= hole).to(tl.int32)).to(tl.int64)
                held_value = tl.load(values + slot[:, None] * DV + dims[None, :],
                                     mask=(part < slots - 1)[:, None] & dims_ok[None, :], other=0.0)  # fmt: skip
                o = tl.dot(tl.trans(p.to(kind)), held_value.to(kind), o, input_precision=PRECISION)
            into = out + (begin + col)[:, None].to(tl.int64) * out_token + (source * G + g) * out_head + dims[None, :]
            tl.store(into, o.to(out.dtype.element_ty), mask=valid[:, None] & dims_ok[None, :])
            tl.debug_barrier()
        meetings += 1
        meet(arrived, meetings * members, SPLIT)

        # Worth of the places and of the chunk.
        paid, squares, new_score = tl.zeros([WP], tl.float32), tl.zeros([WP], tl.float32), tl.zeros([C], tl.float32)
        for g in range(G):
            to = mine + g * (2 * WP + C)
            paid += tl.load(to + place, cache_modifier=".cg")
            if LONG:
                squares += tl.load(to + WP + place, cache_modifier=".cg")
            new_score += tl.load(to + 2 * WP + col, cache_modifier=".cg")
        index_of = tl.load(whole + place)
        rank_of = tl.load(whole + WP + place) + n
        score = tl.load(floats + place)
        long = tl.zeros([WP], tl.float32)
        if POLICY == TOVA:
            score = tl.where(index_of >= 0, paid, score)
        elif POLICY < 2:
            score = score * tl.exp2(n * tl.log2(decay)) + paid
        else:
            new_score = new_score * 0.0
        if LONG:
            long = tl.load(floats + WP + place) * tl.exp2(n * tl.log2(long_decay))
            long += tl.where(index_of < before - far, squares, 0.0)
            tl.store(floats + WP + place, long)
        worth = worth_of(score, long, index_of, rank_of, before + n, head, pins, pin_count, transient, transient_count,
                         recent, sinks, long_weight, seed, layer, POLICY, LONG)  # fmt: skip
        worth = tl.where(index_of < 0, EMPTY, worth)
        new_worth = worth_of(new_score, 0.0, query_index.to(tl.int32), later, before + n, head, pins, pin_count,
                             transient, transient_count, recent, sinks, long_weight, seed, layer, POLICY,
                             LONG)  # fmt: skip
        tl.store(floats + place, score)
        tl.store(worths + place, tl.where(inside, worth, float("inf")) + 0.0)
        tl.store(worths + WP + col, tl.where(valid, new_worth, float("-inf")) + 0.0)
        tl.store(arriving + col, new_score)
        tl.debug_barrier()

        # Drop the least worthy: columns after the last token go first, then empty slots. As integers that order like
        # the worths, the last one to go is found bit by bit; of equal ones the first in order are dropped.
        drops = C
        if limits is not None:
            drops += slots - 1 - tl.load(limits + row * tl.cdiv(tokens, step) + chunk)
        ordered = tl.load(worths + every, mask=every < WP + C, other=float("inf")).to(tl.int32, bitcast=True)
        ordered ^= (ordered >> 31) & 0x7FFFFFFF
        limit = tl.where(tl.sum((ordered < 0).to(tl.int32), 0) < drops, 0, -2147483648)
        for bit in range(31):
            above = limit + (1 << (30 - bit))
            limit = tl.where(tl.sum((ordered < above).to(tl.int32), 0) < drops, above, limit)
        equal = (ordered == limit).to(tl.int32)
        room = drops - tl.sum((ordered < limit).to(tl.int32), 0)
        dropped = (ordered < limit) | ((equal > 0) & (tl.cumsum(equal, 0) <= room))
        leaves = dropped & (every < WP)
        enters = (every >= WP) & (every < WP + C) & (dropped == 0)
        numbered = tl.cumsum(leaves.to(tl.int32) + (enters.to(tl.int32) << 16), 0)
        entering, leaving = tl.sum(enters.to(tl.int32), 0), tl.sum(leaves.to(tl.int32), 0)
        # Lists: of the places dropped, of their tokens' indices, of the tokens that enter, the n-th into the n-th.
        old_index = tl.load(whole + every, mask=every < WP, other=-1)
        tl.store(lists + (numbered & 0xFFFF) - 1, every, mask=leaves)
        tl.store(lists + WP + (numbered & 0xFFFF) - 1, old_index, mask=leaves)
        tl.store(lists + 2 * WP + (numbered >> 16) - 1, every - WP, mask=enters)
        tl.debug_barrier()
        for piece in range(0, WP, P):
            part = piece + tl.arange(0, P)
            index_part = tl.load(whole + part)
            rank_part = tl.load(whole + WP + part) + entering
            for first_gone in range(0, leaving, C):
                gone = tl.load(lists + WP + first_gone + col, mask=first_gone + col < leaving, other=-1)
                rank_part -= tl.sum((gone[None, :] > index_part[:, None]).to(tl.int32), 1)
            tl.store(whole + WP + part, rank_part)
        tl.debug_barrier()
        if limits is not None:  # places that nothing enters
            emptied = leaves & ((numbered & 0xFFFF) > entering)
            tl.store(floats + every, tl.full([WC], float("-inf"), tl.float32), mask=emptied)
            tl.store(whole + every, tl.full([WC], -1, tl.int32), mask=emptied)
            tl.store(whole + WP + every, tl.zeros([WC], tl.int32) + slots, mask=emptied)
        comes = col < entering
        target = tl.load(lists + col, mask=comes, other=0)
        entry = tl.load(lists + 2 * WP + col, mask=comes, other=0)
        tl.store(floats + target, tl.load(arriving + entry, mask=comes, other=0.0), mask=comes)
        if LONG:
            tl.store(floats + WP + target, tl.zeros([C], tl.float32), mask=comes)
        tl.store(whole + target, before.to(tl.int32) + entry, mask=comes)
        tl.store(whole + WP + target, entering - 1 - col, mask=comes)
        slot = (pid * slots + target + (target >= hole).to(tl.int32)).to(tl.int64)
        if BITS < 16:  # one of the programs stores for all
            comes &= member == 0
        low_dims, rest_dims = tl.arange(0, HP), tl.arange(0, TP)
        entry_key = key + (begin + entry).to(tl.int64)[:, None] * key_token
        if ROTATE:
            mask = comes[:, None] & (low_dims < R // 2)[None, :]
            for half in tl.static_range(2):
                dim = half * (R // 2) + low_dims[None, :]
                x = tl.load(entry_key + dim, mask=mask, other=0.0).to(tl.float32) * factor
                tl.store(keys + slot[:, None] * D + dim, x.to(kind), mask=mask)
        if TAIL:
            mask = comes[:, None] & (rest_dims < D - R)[None, :]
            x = tl.load(entry_key + R + rest_dims[None, :], mask=mask, other=0.0)
            tl.store(keys + slot[:, None] * D + R + rest_dims[None, :], x.to(kind), mask=mask)
        mask = comes[:, None] & dims_ok[None, :]
        x = tl.load(value + (begin + entry).to(tl.int64)[:, None] * value_token + dims[None, :], mask=mask, other=0.0)
        tl.store(values + slot[:, None] * DV + dims[None, :], x.to(kind), mask=mask)
        tl.debug_barrier()
        if BITS < 16:
            if member == 0:
                at_range = pid * 2 * D
                quantize_chunk(keys + base * D, values + base * DV, key_range + at_range, ranges + at_range, whole,
                               lists, entering, hole, n, before, WP, C, D, DV, BITS, SINKS, RING, KP, VP)  # fmt: skip
            meetings += 1
            meet(arrived, meetings * members, SPLIT)
        chunk += 1
        begin += step
    tl.store(scores + at, tl.load(floats + place), mask=inside)
    if LONG:
        tl.store(longs + at, tl.load(floats + WP + place), mask=inside)
    tl.store(index + at, tl.load(whole + place), mask=inside)
    tl.store(rank + at, tl.load(whole + WP + place).to(rank.dtype.element_ty), mask=inside)
