"""Keys and values in a few bits, as `cache.quantize` and `cache.quantized_store` have them."""

import triton
import triton.language as tl

from h2o_stream.cache.quantized_store import MARGIN as _MARGIN
from h2o_stream.cache.quantized_store import SLACK as _SLACK

MARGIN = tl.constexpr(_MARGIN)
SLACK = tl.constexpr(_SLACK)

TINY = tl.constexpr(1.1754943508222875e-38)
MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2**23: what is added to a small number and subtracted again leaves it a whole number."""


@triton.jit
def _spread(low, high, BITS: tl.constexpr, covers: tl.constexpr):
    """See `quantize.spread`."""
    half = tl.where(low <= high, (high - low) / 2 * covers, 0.0)
    middle = tl.where(low <= high, (low + high) / 2, 0.0)
    return middle - half, half * 2 / (2**BITS - 1)


@triton.jit
def exact_slot(index, SINKS: tl.constexpr, RING: tl.constexpr):
    """The slot of a token among the first or the newest, by its index."""
    return tl.where(index < SINKS, index, SINKS + (index - SINKS) % RING).to(tl.int32)


@triton.jit
def grid_of_keys(ranges, dims, ok, D: tl.constexpr, BITS: tl.constexpr):
    """Offsets and steps of key channels, whose minima and maxima [2, D] are at a pointer."""
    low = tl.load(ranges + dims, mask=ok, other=0.0)
    return _spread(low, tl.load(ranges + D + dims, mask=ok, other=0.0), BITS, 0.57 if BITS == 2 else 1.0)


@triton.jit
def _level(x, offset, step, BITS: tl.constexpr):
    """See `quantize.levels`."""
    level = tl.minimum(tl.maximum((x - offset) / tl.maximum(step, TINY), 0.0), 2.0**BITS - 1)
    return (level + MAGIC) - MAGIC


@triton.jit
def _code(codes, dims, ok, D: tl.constexpr, BITS: tl.constexpr):
    """Codes of some dimensions, int32, of heads at pointers; see `quantize.encode` for where they are."""
    WIDTH: tl.constexpr = 4 if BITS == 6 else BITS
    SIZE: tl.constexpr = D * WIDTH // 8
    byte = tl.load(codes + dims % SIZE, mask=ok, other=0).to(tl.int32)
    code = (byte >> (dims // SIZE * WIDTH)) & (2**WIDTH - 1)
    if BITS == 6:
        byte = tl.load(codes + SIZE + dims % (D // 4), mask=ok, other=0).to(tl.int32)
        code |= ((byte >> (dims // (D // 4) * 2)) & 3) << 4
    return code


@triton.jit
def load_slots(exact, codes, slot, dims, ok, offset, step, stored, D: tl.constexpr, BITS: tl.constexpr):
    """Numbers [n, m] of slots [n] of a head: the first `stored` slots hold them as they are, the others codes."""
    rows, cols = slot[:, None], dims[None, :]
    if BITS == 16:
        x = tl.load(exact + rows * D + cols, mask=ok, other=0.0)
    else:
        near = ok & (rows < stored)
        x = tl.load(exact + rows * D + cols, mask=near, other=0.0).to(tl.float32)
        code = _code(codes + (rows - stored) * (D * BITS // 8), cols, ok & (rows >= stored), D, BITS)
        x = tl.where(near, x, offset + code.to(tl.float32) * step)
    return x


@triton.jit
def _packed(source, old, ranges, offset, step, ok, first: tl.constexpr, width: tl.constexpr, D: tl.constexpr,
            DP: tl.constexpr, BITS: tl.constexpr):  # fmt: skip
    """Bytes of a plane, of `width` bits of codes from the `first` on; where in a head they are, and which of them."""
    byte = tl.arange(0, DP * width // 8)[None, :]
    ok = ok & (byte < D * width // 8)
    packed = byte * 0
    for part in tl.static_range(8 // width):
        dims = part * (D * width // 8) + byte
        if ranges is not None:
            offset, step = grid_of_keys(ranges, dims, ok, D, BITS)
        if old is None:
            x = tl.load(source + dims, mask=ok, other=0.0).to(tl.float32)
        else:
            old_offset, old_step = grid_of_keys(old, dims, ok, D, BITS)
            x = old_offset + _code(source, dims, ok, D, BITS).to(tl.float32) * old_step
        code = _level(x, offset, step, BITS).to(tl.int32)
        packed = packed | (((code >> first) & (2**width - 1)) << (part * width))
    return packed.to(tl.uint8), D * first // 8 + byte, ok


@triton.jit
def _pack(target, source, old, ranges, offset, step, ok, D: tl.constexpr, DP: tl.constexpr, BITS: tl.constexpr):
    """Encode heads at pointers [n, 1], on the grid of key ranges or [n, 1] grids; on an `old` grid they are codes."""
    WIDTH: tl.constexpr = 4 if BITS == 6 else BITS
    lower, at, lower_ok = _packed(source, old, ranges, offset, step, ok, 0, WIDTH, D, DP, BITS)
    if BITS == 6:
        upper, upper_at, upper_ok = _packed(source, old, ranges, offset, step, ok, 4, 2, D, DP, BITS)
    tl.debug_barrier()
    tl.store(target + at, lower, mask=lower_ok)
    if BITS == 6:
        tl.store(target + upper_at, upper, mask=upper_ok)


@triton.jit
def _error(x, ok, offset, step, BITS: tl.constexpr):
    error = _level(x, offset[:, None], step[:, None], BITS) * step[:, None] + offset[:, None] - x
    return tl.sum(tl.where(ok, error * error, 0.0), 1)


@triton.jit
def fit(x, ok, BITS: tl.constexpr):
    """Offsets and steps [n] of values [n, m], float16; see `quantize.fit`."""
    low, high = tl.min(tl.where(ok, x, float("inf")), 1), tl.max(tl.where(ok, x, float("-inf")), 1)
    offset, step = _spread(low, high, BITS, 1.0)
    if BITS <= 4:
        error = _error(x, ok, offset, step, BITS)
        for number in tl.static_range(1, 7):
            other_offset, other_step = _spread(low, high, BITS, (10 - number) / 10)
            other = _error(x, ok, other_offset, other_step, BITS)
            better = other < error
            offset, step = tl.where(better, other_offset, offset), tl.where(better, other_step, step)
            error = tl.minimum(other, error)
    return offset.to(tl.float16), step.to(tl.float16)


@triton.jit
def widen(ranges, old, low, high, dims, D: tl.constexpr):
    """Extend key ranges to numbers between `low` and `high`, keep them as they were at `old`; whether any changed."""
    ok = dims < D
    minimum = tl.load(ranges + dims, mask=ok, other=0.0)
    maximum = tl.load(ranges + D + dims, mask=ok, other=0.0)
    slack = (maximum - minimum) * SLACK
    margin = (tl.maximum(maximum, high) - tl.minimum(minimum, low)) * MARGIN
    below, above = ok & ((low >= minimum - slack) == 0), ok & ((high <= maximum + slack) == 0)
    tl.debug_barrier()  # all threads have read them
    tl.store(old + dims, minimum, mask=ok)
    tl.store(old + D + dims, maximum, mask=ok)
    tl.store(ranges + dims, low - margin, mask=below)
    tl.store(ranges + D + dims, high + margin, mask=above)
    return tl.max((below | above).to(tl.int32), 0) > 0


@triton.jit
def displace(
    keys, values, key_codes, value_codes, ranges, grids, old, new, moved, hole, count, widens, D: tl.constexpr,
    DV: tl.constexpr, BITS: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Encode the token in slot `moved` of a head into the `hole`, one of `count` slots of codes, after key ranges have
    been widened to the token in slot `new`, if that `widens`; see `QuantizedStore.displace`. `old` is memory [2, D].
    """
    dims, row = tl.arange(0, KP), tl.arange(0, 1)[:, None]
    changed = False
    if widens:
        key = tl.load(keys + new * D + dims, mask=dims < D, other=0.0).to(tl.float32)
        changed = widen(ranges, old, key, key, dims, D)
    tl.debug_barrier()
    if changed:
        few: tl.constexpr = max(1024 // KP, 1)
        start = 0
        while start < count:
            slot = start + tl.arange(0, few)[:, None]
            at = key_codes + slot * (D * BITS // 8)
            _pack(at, at, old, ranges, 0.0, 0.0, slot < count, D, KP, BITS)
            start += few
        tl.debug_barrier()
    yes, codes = row == 0, key_codes + (row + hole) * (D * BITS // 8)
    _pack(codes, keys + (row + moved) * D, None, ranges, 0.0, 0.0, yes, D, KP, BITS)
    cols = tl.arange(0, VP)[None, :]
    value = tl.load(values + (row + moved) * DV + cols, mask=cols < DV, other=0.0).to(tl.float32)
    offset, step = fit(value, cols < DV, BITS)
    into = grids + 2 * hole + tl.arange(0, 1)
    tl.store(into, offset)
    tl.store(into + 1, step)
    offset, step = offset[:, None].to(tl.float32), step[:, None].to(tl.float32)
    _pack(value_codes + (row + hole) * (DV * BITS // 8), values + (row + moved) * DV, None, None, offset, step, yes, DV,
          VP, BITS)  # fmt: skip


@triton.jit
def quantize_chunk(
    keys, values, ranges, old, whole, lists, entering, hole, n, before, WP: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BITS: tl.constexpr, SINKS: tl.constexpr, RING: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr,
):  # fmt: skip
    """Replace keys and values [*, D] float32 of a head by those that their codes stand for, once they are neither sinks
    nor in the ring, after `n` tokens; see `QuantizedStore.place_prefill`.

    `whole` has the token indices of the places, `lists` the places that the `entering` ones took.
    """
    few: tl.constexpr = min(C, 16)
    dims, cols = tl.arange(0, KP), tl.arange(0, VP)[None, :]
    low, high = tl.full([KP], float("inf"), tl.float32), tl.full([KP], float("-inf"), tl.float32)
    for first in range(0, entering, few):
        number = first + tl.arange(0, few)
        place = tl.load(lists + number, mask=number < entering, other=0)
        ok = (number < entering) & (tl.load(whole + place) >= SINKS)
        key = keys + (place + (place >= hole).to(tl.int32))[:, None] * D + dims[None, :]
        ok = ok[:, None] & (dims < D)[None, :]
        low = tl.minimum(low, tl.min(tl.load(key, mask=ok, other=float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.load(key, mask=ok, other=float("-inf")), 0))
    changed = widen(ranges, old, low, high, dims, D)
    tl.debug_barrier()
    offset, step = grid_of_keys(ranges, dims[None, :], (dims < D)[None, :], D, BITS)
    end = before + n - (RING - 1)  # of the tokens that are in codes
    for first in range(0, WP, few):
        place = first + tl.arange(0, few)
        index = tl.load(whole + place)
        new = (index >= SINKS) & (index >= end - n) & (index < end)
        slot = (place + (place >= hole).to(tl.int32))[:, None]
        ok = (new | (changed & (index >= SINKS) & (index < end)))[:, None] & (dims < D)[None, :]
        key = keys + slot * D + dims[None, :]
        level = _level(tl.load(key, mask=ok, other=0.0), offset, step, BITS)
        tl.store(key, offset + level * step, mask=ok)
        if tl.max(new.to(tl.int32), 0) > 0:
            ok = new[:, None] & (cols < DV)
            value = tl.load(values + slot * DV + cols, mask=ok, other=0.0)
            value_offset, value_step = fit(value, cols < DV, BITS)
            value_offset, value_step = value_offset[:, None].to(tl.float32), value_step[:, None].to(tl.float32)
            level = _level(value, value_offset, value_step, BITS)
            tl.store(values + slot * DV + cols, value_offset + level * value_step, mask=ok)
    tl.debug_barrier()
