"""Decode steps and prefill chunks of a head group in torch, for every policy, device and dtype.

A decode step writes the token into the free slot, attends, updates the scores and evicts, so that a slot is free for
the next token. A chunk of a prompt attends to the cached tokens and to itself; then the best of both are kept.

All tensors are written in place, because native code knows their addresses.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from h2o_stream.cache.attention import LogitTransform, QueryChunk, attention, causal_mask, rotated_query
from h2o_stream.cache.eviction import free_slots, keep_best
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.policies import Attention, Candidates


class EagerKernels:
    """The `Kernels` that support everything."""

    def supports(self, group: HeadGroup, query: Tensor, transform: LogitTransform) -> bool:
        """Always."""
        return True

    def chunk_size(self, group: HeadGroup, new: int) -> int:
        """A chunk."""
        return group.plan.chunk or new

    def decode(self, group: HeadGroup, chunk: QueryChunk) -> Tensor:
        """Attend with the query of one token, update the scores and evict."""
        slot = group.store.next_slot(group.seen, group.free)
        group.store.write(slot, chunk.key, chunk.value)
        group.add_newest(slot)
        keys, values = group.store.read()
        has_empty = min(map(group.schedule.held, chunk.lengths)) + 1 < group.store.slots
        output, probs = _attention(group, chunk, group.candidates, keys, values, has_empty)
        group.show(probs, group.index)

        received = Attention(probs, probs.new_zeros(1), 1)
        if group.policy.needs_attention:
            group.scores.copy_(group.policy.update_scores(group.scores, received))
        if group.policy.long_term:
            updated = group.policy.update_long_term(group.long_term_scores, group.candidates, received)
            group.long_term_scores.copy_(updated)
        group.update_head_state(chunk)
        moved = group.store.displace(group.seen, group.free, group.index)
        if moved is not None:
            group.move(moved, group.free)
        free_slots(group, [group.schedule.num_evictions(length) for length in chunk.lengths])
        return output

    def prefill(self, group: HeadGroup, chunk: QueryChunk) -> Tensor:
        """Attend to the cached tokens and to the new ones, then keep the best of both."""
        keys, values = group.store.read_exactly(group.filled)
        candidates = _append(group, chunk, keys.shape[2])
        keys, values = torch.cat((keys, chunk.key), 2), torch.cat((values, chunk.value), 2)
        output, probs = _attention(group, chunk, candidates, keys, values)
        if not chunk.ragged:
            group.show(probs, candidates.index)

        received = chunk.attention(probs)
        if group.policy.needs_attention:
            candidates = replace(candidates, scores=group.policy.update_scores(candidates.scores, received))
        if candidates.long_term_scores is not None:
            updated = group.policy.update_long_term(candidates.long_term_scores, candidates, received)
            candidates = replace(candidates, long_term_scores=updated)
        group.update_head_state(chunk)
        keep_best(group, candidates, keys, values, group.limits(chunk))
        return output


def _append(group: HeadGroup, chunk: QueryChunk, filled: int) -> Candidates:
    """The first `filled` slots of a group, then the new tokens."""
    shape = (*group.index.shape[:2], chunk.new)
    is_token, zeros = chunk.is_token.expand(shape), group.scores.new_zeros(shape)
    index = (group.seen + chunk.column).masked_fill(~is_token, -1).int()
    rank = chunk.later.masked_fill(~is_token, filled + chunk.new).int()
    long_term = group.long_term_scores[..., :filled] if group.policy.long_term else None
    return Candidates(
        scores=torch.cat((group.scores[..., :filled], zeros), 2),
        index=torch.cat((group.index[..., :filled], index), 2),
        rank=torch.cat((group.rank[..., :filled].int() + chunk.count.int(), rank), 2),
        seen=group.seen + chunk.count,
        long_term_scores=None if long_term is None else torch.cat((long_term, zeros), 2),
    )


def _attention(
    group: HeadGroup,
    chunk: QueryChunk,
    candidates: Candidates,
    keys: Tensor,
    values: Tensor,
    has_empty: bool = True,
) -> tuple[Tensor, Tensor]:
    """`attention` of the new tokens, rotated and masked by the rules of the group.

    Args:
        group: head group whose table, span, protection and sliding window apply.
        chunk: the Q new tokens.
        candidates: the K cached and new tokens.
        keys: [B, Hkv, K, D].
        values: [B, Hkv, K, D].
        has_empty: whether some of the K may be empty slots.

    Returns:
        Output [B, Q, Hq, D] and float32 probabilities [B, Hkv, G, Q, K].
    """
    query, lookup = chunk.query, group.rotations(candidates, chunk.query.dtype)
    keys, values = keys.to(query.dtype), values.to(query.dtype)
    if lookup is not None:
        query = rotated_query(chunk, lookup.table)
    sees_all = chunk.new == 1 and group.sliding is None and not has_empty
    mask = None if sees_all else causal_mask(candidates, chunk, group.sliding, group.chunked)
    return attention(query, keys, values, lookup, mask, chunk.transform)
