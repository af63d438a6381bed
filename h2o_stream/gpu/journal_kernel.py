"""Copies what a token overwrites in the slots of a head, and back, for `journal`."""

import triton
import triton.language as tl

from h2o_stream.gpu.few_bits import exact_slot


@triton.jit
def _copy(source, target, BACK: tl.constexpr, at, from_at, ok):
    """Copy numbers at offsets of two arrays, back or forth."""
    if BACK:
        tl.store(source + at, tl.load(target + from_at, mask=ok), mask=ok)
    else:
        tl.store(target + from_at, tl.load(source + at, mask=ok), mask=ok)


@triton.jit
def _copy_all(source, target, BACK: tl.constexpr, head, size, BS: tl.constexpr):
    """Copy `size` numbers of a head, or none of arrays that are not there."""
    if source is not None:
        for start in range(0, size, BS):
            number = start + tl.arange(0, BS)
            at = head.to(tl.int64) * size + number
            _copy(source, target, BACK, at, at, number < size)


@triton.jit
def _copy_row(source, target, BACK: tl.constexpr, head, rows, row, size: tl.constexpr, padded: tl.constexpr):
    """Copy a row of `size` numbers, one of so many of a head."""
    cols = tl.arange(0, padded)
    _copy(source, target, BACK, (head.to(tl.int64) * rows + row) * size + cols, head * size + cols, cols < size)


@triton.jit(do_not_specialize=["slots"])
def journal_kernel(
    keys, values, key_codes, value_codes, key_range, value_grid, scores, longs, index, rank, free, seen, old_keys,
    old_values, old_key_codes, old_value_codes, old_key_range, old_value_grid, old_scores, old_longs, old_index,
    old_rank, old_free, old_seen, slots, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr,
    BS: tl.constexpr, BITS: tl.constexpr, SINKS: tl.constexpr, RING: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Note the bookkeeping of all slots of a head, and the one that a token enters; or bring them BACK. With few BITS
    also the free one, and the codes of all keys, which a token may replace. Program: a KV head.
    """
    head = tl.program_id(0)
    hole = tl.load((old_free if BACK else free) + head)
    if BITS == 16:
        _copy_row(keys, old_keys, BACK, head, slots, hole, D, DP)
        _copy_row(values, old_values, BACK, head, slots, hole, DV, VP)
    else:
        entering, stored = exact_slot(tl.load(old_seen if BACK else seen), SINKS, RING), SINKS + RING
        _copy_row(keys, old_keys, BACK, head, stored, entering, D, DP)
        _copy_row(values, old_values, BACK, head, stored, entering, DV, VP)
        _copy_row(value_codes, old_value_codes, BACK, head, slots - stored, hole - stored, DV * BITS // 8, VP)
        _copy_row(value_grid, old_value_grid, BACK, head, slots - stored, hole - stored, 2, 2)
        _copy_all(key_codes, old_key_codes, BACK, head, (slots - stored) * (D * BITS // 8), BS)
        _copy_all(key_range, old_key_range, BACK, head, 2 * D, BS)
    _copy_all(scores, old_scores, BACK, head, slots, BS)
    _copy_all(longs, old_longs, BACK, head, slots, BS)
    _copy_all(index, old_index, BACK, head, slots, BS)
    _copy_all(rank, old_rank, BACK, head, slots, BS)
    one = tl.arange(0, 1)
    _copy(free, old_free, BACK, head + one, head + one, one == 0)
    _copy(seen, old_seen, BACK, one, one, head + one == 0)
