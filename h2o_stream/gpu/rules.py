"""What both attention kernels share: rotations by distance, and what a slot is worth under a policy.

The formulas are those of `cache.policies` and `cache.attention`, which the tests compare with.
"""

import triton
import triton.language as tl

from h2o_stream.native.abi import PolicyKind, PositionMode

NONE = tl.constexpr(-1e30)
"""The logit of what a query does not see: finite, so that a block without any gives no NaN."""

LOWEST = tl.constexpr(-3.4e38)
"""Worth of a token whose score is not a number."""

LOG2E = tl.constexpr(1.4426950408889634)

ACCUMULATED = tl.constexpr(int(PolicyKind.ACCUMULATED))
TOVA = tl.constexpr(int(PolicyKind.TOVA))
RANDOM = tl.constexpr(int(PolicyKind.RANDOM))
RECENCY = tl.constexpr(int(PolicyKind.RECENCY))

GAP = tl.constexpr(int(PositionMode.GAP))
ROLLING = tl.constexpr(int(PositionMode.ROLLING))

WINDOW = tl.constexpr(1)
CHUNKED = tl.constexpr(2)
"""Kinds of sliding layers; 0 for none."""


BOOKKEEPING = [
    "slots", "table_rows", "pin_count", "transient_count", "recent", "sinks", "span", "far", "seed", "layer", "sliding",
]  # fmt: skip
"""Numbers whose values do not compile a kernel again: a second pin would wait for that."""


@triton.jit
def in_ranges(index, ranges, count):
    """Which token indices are in one of `count` ranges [count, 2] int64."""
    inside = index < -1
    for number in range(count):
        inside |= (index >= tl.load(ranges + 2 * number)) & (index < tl.load(ranges + 2 * number + 1))
    return inside


@triton.jit
def distance_of(index, rank, newest, pins, pin_count, span, rows, POSITIONS: tl.constexpr):
    """Where RoPE sees keys: how far behind the newest token. 0 for empty slots."""
    if POSITIONS == GAP:
        if pins is not None:
            span = tl.where(in_ranges(index, pins, pin_count), 0, span)
        distance = tl.minimum((newest - index).to(tl.int32), rank + span)
    else:
        distance = rank
    return tl.where(index < 0, 0, tl.minimum(tl.maximum(distance, 0), rows - 1))


@triton.jit
def oldest_seen(query_index, sliding, SLIDING: tl.constexpr):
    """The first token that a query sees in a sliding layer."""
    if SLIDING == CHUNKED:
        oldest = query_index // sliding * sliding
    else:
        oldest = query_index - sliding + 1
    return oldest


@triton.jit
def capped(logits, softcap, SOFTCAP: tl.constexpr):
    """Logits within a soft cap, if there is one."""
    if SOFTCAP:
        logits = softcap - 2.0 * softcap / (tl.exp(2.0 * logits / softcap) + 1.0)
    return logits


@triton.jit
def mixed(x):
    """MurmurHash3's finalizer, see `cache.policies.random`."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def worth_of(
    score, long, index, rank, seen, head, pins, pin_count, transient, transient_count, recent, sinks, long_weight, seed,
    layer, POLICY: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Worth of tokens as `Policy.worth` has it; of empty slots it means nothing. `seen` counts the new tokens."""
    if POLICY == RECENCY:
        worth = -rank.to(tl.float32)
    elif POLICY == RANDOM:
        drawn = mixed((seen + seed).to(tl.uint32)) + (layer * 0x10001 + head).to(tl.uint32)
        drawn = mixed(mixed(drawn) + index.to(tl.uint32))
        worth = (drawn & 0xFFFFFF).to(tl.float32) / 16777216.0
    else:
        worth = score
        if LONG:
            worth += long_weight * long
        worth = tl.where(worth == worth, worth, LOWEST)
    if transient is not None:
        below = -1.7014118346046923e38 - 2.028240960365167e31 * rank.to(tl.float32)
        worth = tl.where(in_ranges(index, transient, transient_count), below, worth)
    protected = (rank < recent) | (index < sinks)
    if pins is not None:
        protected |= in_ranges(index, pins, pin_count)
    return tl.where(protected, float("inf"), worth)
