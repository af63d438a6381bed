"""Attention, scores and eviction for one token of each row: one launch for a head group.

Nothing asks the host anything, so that a step can be a CUDA graph. With PDL (programmatic dependent launch) the kernel
starts while the one before it ends, and loads slots before it waits.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from h2o_stream.gpu.few_bits import displace, exact_slot, grid_of_keys, load_slots
from h2o_stream.gpu.heads import dims_of, heads_of
from h2o_stream.gpu.rules import BOOKKEEPING, NONE, TOVA, capped, distance_of, oldest_seen, worth_of
from h2o_stream.gpu.streams import array_of, number_of


@triton.jit
def _keys(keys, codes, ranges, slot, dims, ok, stored, D: tl.constexpr, BITS: tl.constexpr):
    """Some dimensions of the keys in slots of a head."""
    offset, step = 0.0, 0.0
    if BITS < 16:
        offset, step = grid_of_keys(ranges, dims[None, :], dims[None, :] < D, D, BITS)
    return load_slots(keys, codes, slot, dims, ok, offset, step, stored, D, BITS)


@triton.jit
def _enter(scores, longs, index, rank, at, score, long, token, newer, LONG: tl.constexpr):
    """Enter a token in a slot."""
    tl.store(scores + at, score)
    tl.store(index + at, token.to(tl.int32))
    tl.store(rank + at, newer.to(rank.dtype.element_ty))
    if LONG:
        tl.store(longs + at, long)


@triton.jit
def _clear(scores, index, rank, at, slots):
    """Enter a slot as empty."""
    tl.store(index + at, -1)
    tl.store(rank + at, slots.to(rank.dtype.element_ty))
    tl.store(scores + at, float("-inf"))


@triton.jit(do_not_specialize=BOOKKEEPING)
def decode_kernel(
    query, key, value, out, heads, keys, values, key_codes, value_codes, key_range, value_grid, scores, longs, index,
    rank, free, seen, streams, table, pins, transient, sink_logits, query_norm, key_norm, logits, parts, peaks, arrived,
    ranges,
    query_row, query_head, key_row, key_head, value_row, value_head, out_row, out_head,
    slots, table_rows, pin_count, transient_count, recent, sinks, span, scale, softcap, decay, long_decay, long_weight,
    far, seed, layer, sliding, query_eps, key_eps, factor,
    H: tl.constexpr, G: tl.constexpr, G2: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    R: tl.constexpr, HP: tl.constexpr, TP: tl.constexpr, VP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr,
    NP: tl.constexpr, P: tl.constexpr, KP: tl.constexpr, POLICY: tl.constexpr, POSITIONS: tl.constexpr,
    LONG: tl.constexpr, SOFTCAP: tl.constexpr, SLIDING: tl.constexpr, EMPTY_FIRST: tl.constexpr,
    PRECISION: tl.constexpr, BITS: tl.constexpr, SINKS: tl.constexpr, RING: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row and KV head, split): BS of the slots beside the free one, which count as places.

    The last one of a head to finish merges what the NS splits found, updates the scores, enters the token and frees the
    slot of what is worth least. The last head of a row to finish counts the token.

    Slots are as in `cache.slots`: keys [B, H, S, D], values [B, H, S, DV], the rest [B, H, S], free [B, H], seen [B].
    With few BITS, keys and values are those of SINKS and a RING, see `cache.quantized_store`: the token enters there,
    and the one whose slot the next token needs goes to the free one.
    With `streams`, a table as in `gpu.streams`, each row has other slots and pins, like those of the arguments.
    The group's heads are `heads` [H] of the token's, or all. The table [N, R] has cosines and sines by distance;
    without rotations R is 0. HP, TP and VP are at least half of R, the rest of a head, and DV; GP and G2 at least G.
    P is at least the number of threads: two that had the same place would read its score again after it was stored.
    Memory: logits [B, H, G, S], parts [B, H, G, NS, DV], peaks [B, H, G, NS, 2] float32; arrived [B H + B] int32, zero
    between launches; with few bits also ranges [B, H, 2, D] float32.
    """
    if PDL:
        gdc_launch_dependents()
    ROTATE: tl.constexpr = R > 0
    TAIL: tl.constexpr = D > R
    pid, split = tl.program_id(0), tl.program_id(1)
    row, head = pid // H, pid % H
    token, home, source = row, pid, head
    if streams is not None:
        keys, values = array_of(streams, row, keys, 0), array_of(streams, row, values, 1)
        key_codes, value_codes = array_of(streams, row, key_codes, 2), array_of(streams, row, value_codes, 3)
        key_range, value_grid = array_of(streams, row, key_range, 4), array_of(streams, row, value_grid, 5)
        scores, longs = array_of(streams, row, scores, 6), array_of(streams, row, longs, 7)
        index, rank = array_of(streams, row, index, 8), array_of(streams, row, rank, 9)
        free, seen = array_of(streams, row, free, 10), array_of(streams, row, seen, 11)
        pins, transient = array_of(streams, row, pins, 12), array_of(streams, row, transient, 13)
        pin_count, transient_count = number_of(streams, row, 14), number_of(streams, row, 15)
        token, home = number_of(streams, row, 16), head
    if heads is not None:
        source = tl.load(heads + head).to(tl.int32)
    kind: tl.constexpr = keys.dtype.element_ty
    before = tl.load(seen + home // H)
    hole = tl.load(free + home).to(tl.int32)
    entering, stored = hole, slots
    if BITS < 16:
        stored, entering = 0 * slots + SINKS + RING, exact_slot(before, SINKS, RING)
        key_codes += home.to(tl.int64) * (slots - stored) * (D * BITS // 8)
        value_codes += home.to(tl.int64) * (slots - stored) * (DV * BITS // 8)
        value_grid += home.to(tl.int64) * (slots - stored) * 2
        key_range += home * 2 * D
    keys += home.to(tl.int64) * stored * D
    values += home.to(tl.int64) * stored * DV
    low, low_ok = dims_of(0, R // 2, HP)
    rest, rest_ok = dims_of(R, D - R, TP)
    dims, dims_ok = dims_of(0, DV, VP)

    # Slots do not depend on the kernel before this one: load and rotate them while it ends.
    place = split * BS + tl.arange(0, BS)
    slot = place + (place >= hole).to(tl.int32)
    at = home * slots + slot
    index_of = tl.load(index + at, mask=slot < slots, other=-1)
    rank_of = tl.load(rank + at, mask=slot < slots, other=0).to(tl.int32) + 1
    filled = index_of >= 0
    if ROTATE:
        ok = filled[:, None] & low_ok[None, :]
        distance = distance_of(index_of, rank_of, before, pins, pin_count, span, table_rows, POSITIONS)
        turn = table + distance[:, None].to(tl.int64) * R + low[None, :]
        cos = tl.load(turn, mask=ok, other=0.0).to(tl.float32)
        sin = tl.load(turn + R // 2, mask=ok, other=0.0).to(tl.float32)
        first = _keys(keys, key_codes, key_range, slot, low, ok, stored, D, BITS).to(tl.float32)
        second = _keys(keys, key_codes, key_range, slot, R // 2 + low, ok, stored, D, BITS).to(tl.float32)
        key1, key2 = (first * cos + second * sin).to(kind), (second * cos - first * sin).to(kind)
    if TAIL:
        ok = filled[:, None] & rest_ok[None, :]
        key3 = _keys(keys, key_codes, key_range, slot, rest, ok, stored, D, BITS).to(kind)
    offset, step = 0.0, 0.0
    if BITS < 16:
        grid, coded = value_grid + 2 * (slot - stored), filled & (slot >= stored)
        offset = tl.load(grid, mask=coded, other=0.0).to(tl.float32)[:, None]
        step = tl.load(grid + 1, mask=coded, other=0.0).to(tl.float32)[:, None]
    ok = filled[:, None] & dims_ok[None, :]
    found_values = load_slots(values, value_codes, slot, dims, ok, offset, step, stored, DV, BITS).to(kind)
    if PDL:
        gdc_wait()

    group = tl.arange(0, GP)
    real = group < G
    q1, q2, q3 = heads_of(query + token.to(tl.int64) * query_row, query_head, source * G + group, real, query_norm,
                          query_eps, factor, D, R, HP, TP, ROTATE, TAIL, kind)  # fmt: skip
    logit = tl.zeros([GP, BS], tl.float32)
    if ROTATE:
        logit = tl.dot(q1, tl.trans(key1), logit, input_precision=PRECISION)
        logit = tl.dot(q2, tl.trans(key2), logit, input_precision=PRECISION)
    if TAIL:
        logit = tl.dot(q3, tl.trans(key3), logit, input_precision=PRECISION)
    visible = filled
    if SLIDING:
        visible &= index_of >= oldest_seen(before, sliding, SLIDING)
    logit = tl.where(visible[None, :], capped(logit * scale, softcap, SOFTCAP), NONE)
    peak = tl.max(logit, 1)
    p = tl.where(visible[None, :], tl.exp(logit - peak[:, None]), 0.0)
    part = (pid * G + group) * NS + split
    tl.store(peaks + part * 2, peak, mask=real)
    tl.store(peaks + part * 2 + 1, tl.sum(p, 1), mask=real)
    to = logits + ((pid * G + group) * slots)[:, None] + slot[None, :]
    tl.store(to, logit, mask=real[:, None] & (slot < slots)[None, :])
    found = tl.dot(p.to(kind), found_values, input_precision=PRECISION)
    tl.store(parts + part[:, None] * DV + dims[None, :], found, mask=real[:, None] & dims_ok[None, :])

    tl.debug_barrier()
    if tl.atomic_add(arrived + pid, 1, sem="acq_rel") == NS - 1:
        tl.debug_barrier()
        # The new token's own logit, and the sum of what the splits found.
        member, one = tl.arange(0, G2), tl.arange(0, 1)
        exists = member < G
        m1, m2, m3 = heads_of(query + token.to(tl.int64) * query_row, query_head, source * G + member, exists,
                              query_norm, query_eps, factor, D, R, HP, TP, ROTATE, TAIL, kind)  # fmt: skip
        n1, n2, n3 = heads_of(key + token.to(tl.int64) * key_row, key_head, source + one, one == 0, key_norm, key_eps,
                              factor, D, R, HP, TP, ROTATE, TAIL, kind)  # fmt: skip
        new_value = tl.load(
            value + token.to(tl.int64) * value_row + source * value_head + dims, mask=dims_ok, other=0.0
        )
        new_value = new_value.to(kind)
        new_logit = tl.zeros([G2], tl.float32)
        if ROTATE:
            new_logit += tl.sum(m1.to(tl.float32) * n1.to(tl.float32) + m2.to(tl.float32) * n2.to(tl.float32), 1)
        if TAIL:
            new_logit += tl.sum(m3.to(tl.float32) * n3.to(tl.float32), 1)
        new_logit = capped(new_logit * scale, softcap, SOFTCAP)
        top = new_logit
        if sink_logits is not None:
            sink = tl.load(sink_logits + source * G + member, mask=exists, other=NONE).to(tl.float32)
            top = tl.maximum(top, sink)
        new_p = tl.exp(new_logit - top)
        total = new_p
        if sink_logits is not None:
            total += tl.exp(sink - top)
        output = new_p[:, None] * new_value.to(tl.float32)[None, :]
        for first_part in range(0, NS, NP):
            number = first_part + tl.arange(0, NP)
            part_of = (pid * G + member)[:, None] * NS + number[None, :]
            there = exists[:, None] & (number < NS)[None, :]
            peak_of = tl.load(peaks + part_of * 2, mask=there, other=NONE, cache_modifier=".cg")
            sums = tl.load(peaks + part_of * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
            at_parts = parts + part_of[:, :, None] * DV + dims[None, None, :]
            parts_ok = there[:, :, None] & dims_ok[None, None, :]
            found_of = tl.load(at_parts, mask=parts_ok, other=0.0, cache_modifier=".cg")
            higher = tl.maximum(top, tl.max(peak_of, 1))
            weight, before_weight = tl.exp(peak_of - higher[:, None]), tl.exp(top - higher)
            total = total * before_weight + tl.sum(sums * weight, 1)
            output = output * before_weight[:, None] + tl.sum(found_of * weight[:, :, None], 1)
            top = higher
        new_p = tl.exp(new_logit - top)
        into = out + token.to(tl.int64) * out_row + (source * G + member)[:, None] * out_head + dims[None, :]
        tl.store(into, (output / total[:, None]).to(out.dtype.element_ty), mask=exists[:, None] & dims_ok[None, :])
        itself = tl.sum(tl.where(exists, new_p / total, 0.0), 0)
        if POLICY >= 2:
            itself = itself * 0.0

        # Scores, and the place of what is worth least.
        least, victim, left = float("inf"), 0, 0
        if BITS < 16:
            victim = stored
        if hole == victim:
            victim = tl.minimum(victim + 1, slots - 1)
        start = 0
        while start < slots - 1:
            places = start + tl.arange(0, P)
            slot_of = places + (places >= hole).to(tl.int32)
            inside = slot_of < slots
            spot = home * slots + slot_of
            index_at = tl.load(index + spot, mask=inside, other=-1)
            rank_at = tl.load(rank + spot, mask=inside, other=0).to(tl.int32) + 1
            score = tl.load(scores + spot, mask=inside, other=0.0)
            long = tl.zeros([P], tl.float32)
            if LONG:
                long = tl.load(longs + spot, mask=inside, other=0.0)
            if POLICY < 2:
                at_logits = logits + ((pid * G + member) * slots)[:, None] + slot_of[None, :]
                logits_ok = exists[:, None] & inside[None, :]
                logit_of = tl.load(at_logits, mask=logits_ok, other=NONE, cache_modifier=".cg")
                paid = tl.where(logit_of > NONE, tl.exp(logit_of - top[:, None]) / total[:, None], 0.0)
                received = tl.sum(tl.where(exists[:, None], paid, 0.0), 0)
                if POLICY == TOVA:
                    score = tl.where(index_at >= 0, received, score)
                else:
                    score = score * decay + received
                if LONG:
                    squares = tl.sum(tl.where(exists[:, None], paid * paid, 0.0), 0)
                    long = long * long_decay + tl.where(index_at < before - far, squares, 0.0)
                    tl.store(longs + spot, long, mask=inside)
                tl.store(scores + spot, score, mask=inside)
            worth = worth_of(score, long, index_at, rank_at, before + 1, head, pins, pin_count, transient,
                             transient_count, recent, sinks, long_weight, seed, layer, POLICY, LONG)  # fmt: skip
            if EMPTY_FIRST:
                worth = tl.where(index_at < 0, float("-inf"), worth)
            else:
                worth = tl.where(index_at < 0, float("inf"), worth)
            if BITS < 16:
                inside &= slot_of >= stored
            worth = tl.where(inside, worth, float("inf"))
            low_worth = tl.min(worth, 0)
            if low_worth < least:
                best = start + tl.argmin(worth, 0)
                victim = best + (best >= hole).to(tl.int32)
                least = low_worth
            start += P
        zero = tl.zeros([1], tl.int32)
        new_score, new_long = itself + zero.to(tl.float32), itself * 0.0
        new_index, new_rank = before.to(tl.int32) + zero, zero
        if BITS < 16:  # of the token that goes to the free slot, if there is one
            tl.debug_barrier()
            moved = exact_slot(before + 1, SINKS, RING)
            from_slot = home * slots + moved + zero
            if moved != entering:
                new_score, new_index = tl.load(scores + from_slot), tl.load(index + from_slot)
                new_rank = tl.load(rank + from_slot).to(tl.int32) + 1
                if LONG:
                    new_long = tl.sum(tl.load(longs + from_slot), 0)
        new_worth = worth_of(new_score, new_long, new_index, new_rank, before + 1, head, pins, pin_count, transient,
                             transient_count, recent, sinks, long_weight, seed, layer, POLICY, LONG)  # fmt: skip
        if BITS < 16:
            new_worth = tl.where(new_index < 0, float("-inf") if EMPTY_FIRST else float("inf"), new_worth)
        stays = tl.min(new_worth, 0) >= least
        if stays:
            left = tl.load(rank + home * slots + victim).to(tl.int32) + 1
        else:
            victim, left = hole, tl.min(new_rank, 0)
        tl.debug_barrier()
        start = 0
        while start < slots - 1:
            places = start + tl.arange(0, P)
            slot_of = places + (places >= hole).to(tl.int32)
            spot = home * slots + slot_of
            rank_at = tl.load(rank + spot, mask=slot_of < slots, other=0).to(tl.int32) + 1
            rank_at = tl.where(slot_of == victim, slots, rank_at - (rank_at > left).to(tl.int32))
            tl.store(rank + spot, rank_at.to(rank.dtype.element_ty), mask=slot_of < slots)
            start += P

        # The token goes into the slot that was free, and the least worthy one's is free.
        if ROTATE:
            entry = keys + entering * D + low[None, :]
            tl.store(entry, n1, mask=low_ok[None, :])
            tl.store(entry + R // 2, n2, mask=low_ok[None, :])
        if TAIL:
            tl.store(keys + entering * D + rest[None, :], n3, mask=rest_ok[None, :])
        tl.store(values + entering * DV + dims, new_value, mask=dims_ok)
        _enter(scores, longs, index, rank, home * slots + entering + zero, itself, itself * 0.0, before, zero, LONG)
        tl.debug_barrier()
        if BITS < 16:
            new_rank -= (new_rank > left).to(tl.int32)
            _enter(
                scores, longs, index, rank, home * slots + hole + zero, new_score, new_long, new_index, new_rank, LONG
            )
            _clear(scores, index, rank, home * slots + moved, slots)
            displace(keys, values, key_codes, value_codes, key_range, value_grid, ranges + pid * 2 * D, entering, moved,
                     hole - stored, slots - stored, before >= SINKS, D, DV, BITS, KP, VP)  # fmt: skip
        _clear(scores, index, rank, home * slots + victim, slots)
        tl.store(free + home, victim.to(tl.int64))
        tl.store(arrived + pid, 0)
        counts = arrived + tl.num_programs(0) + row
        if tl.atomic_add(counts, 1, sem="acq_rel") == H - 1:
            tl.store(seen + home // H, before + 1)
            tl.store(counts, 0)
