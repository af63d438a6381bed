"""What happens to a layer's slots when tokens come, in torch: for every policy, device and dtype.

A decode step writes the token into the free slot, attends, updates the scores and evicts, so that a slot is free for
the next token. A chunk of a prompt attends to what is held and to itself; then the best of both are held. The two are
the same rule, "append, attend, keep", and give the same result token by token.

All tensors are written in place: their addresses are known to native code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from h2o_stream.cache.policies import Attention, Candidates, select
from h2o_stream.cache.store import QuantizedStore
from h2o_stream.cache.layer_attention import QueryChunk, LogitTransform, causal_mask, rotate, attention

if TYPE_CHECKING:
    from h2o_stream.cache.head_group import HeadGroup


class EagerKernels:
    """The `slots.Kernels` that serve everything."""

    def serves(self, layer: HeadGroup, query: Tensor) -> bool:
        """Always."""
        return True

    def decode(
        self,
        layer: HeadGroup,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        transform: LogitTransform,
        evictions: Sequence[int],
    ) -> Tensor:
        """See `slots.Kernels.decode`."""
        vacant = min(layer.limits) + 1 < layer.store.slots
        slot = layer.ring(layer.seen).expand_as(layer.free) if layer.store.exact else layer.free
        layer.store.write(slot, key, value)
        layer.index.scatter_(2, slot, layer.seen.int().expand(slot.shape))
        layer.scores.scatter_(2, slot, 0.0)
        if layer.policy.long_term:
            layer.long_term_scores.scatter_(2, slot, 0.0)
        layer.rank += 1
        layer.rank.scatter_(2, slot, 0)
        layer.seen += 1

        keys, values = layer.store.read()
        chunk = QueryChunk((1,), 1, query.device)
        output, probs = layer_attention(layer, query, keys, values, layer.places, chunk, transform, vacant)
        layer.watch(probs, layer.index >= 0, layer.lengths[0] + 1)
        paid = Attention(probs, probs.new_zeros(1), 1)
        if layer.policy.needs_attention:
            layer.scores.copy_(layer.policy.update_scores(layer.scores, paid))
        if layer.policy.long_term:
            layer.long_term_scores.copy_(layer.policy.update_long_term(layer.long_term_scores, layer.places, paid))
        if isinstance(layer.store, QuantizedStore):
            _demote(layer, layer.store)
        _evict(layer, evictions)
        return output

    def prefill(
        self,
        layer: HeadGroup,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        transform: LogitTransform,
        counts: Sequence[int],
        limits: Sequence[int],
    ) -> Tensor:
        """See `slots.Kernels.prefill`."""
        chunk = QueryChunk(tuple(counts), key.shape[2], key.device)
        keys, values = layer.store.read_exactly(layer.filled)
        used, count = keys.shape[2], chunk.count
        there = chunk.there.expand(*key.shape[:2], -1)
        index = (layer.seen + chunk.place).masked_fill(~there, -1).int()
        rank = chunk.later.masked_fill(~there, used + chunk.new).int()
        held = Candidates(
            scores=torch.cat((layer.scores[..., :used], layer.scores.new_zeros(there.shape)), 2),
            index=torch.cat((layer.index[..., :used], index), 2),
            rank=torch.cat((layer.rank[..., :used] + count.int(), rank), 2),
            seen=layer.seen + count,
            long_term_scores=torch.cat((layer.long_term_scores[..., :used], layer.scores.new_zeros(there.shape)), 2)
            if layer.policy.long_term
            else None,
        )
        keys, values = torch.cat((keys, key), 2), torch.cat((values, value), 2)

        output, probs = layer_attention(layer, query, keys, values, held, chunk, transform)
        if not chunk.ragged:
            layer.watch(probs, held.index >= 0, layer.lengths[0] + chunk.new)
        paid = chunk.layer_attention(probs)
        if layer.policy.needs_attention:
            held = replace(held, scores=layer.policy.update_scores(held.scores, paid))
        if held.long_term_scores is not None:
            held = replace(held, long_term_scores=layer.policy.update_long_term(held.long_term_scores, held, paid))
        uneven = torch.tensor(limits, device=key.device) if min(limits) < max(limits) else None
        keep, index = select(layer.policy.worth(held, layer.budget), held.index, max(limits), uneven)
        layer.seen.copy_(held.seen)
        _hold(layer, keep, index, keys, values, held)
        return output


EAGER = EagerKernels()


def layer_attention(
    layer: HeadGroup,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    held: Candidates,
    chunk: QueryChunk,
    transform: LogitTransform,
    vacant: bool = True,
) -> tuple[Tensor, Tensor]:
    """`attention` over the places given, rotated and hidden as the layer's positions want it.

    Args:
        layer: whose rules apply.
        query: [B, Hq, Q, D], un-rotated unless positions are ``absolute``.
        keys: [B, Hkv, K, D].
        values: [B, Hkv, K, D].
        held: the K places.
        chunk: the queries.
        transform: what the model does with query times key.
        vacant: whether places may be empty.

    Returns:
        Output [B, Q, Hq, D] and float32 probabilities [B, Hkv, G, Q, K].
    """
    keys, values = keys.to(query.dtype), values.to(query.dtype)
    lookup = None
    if layer.table is not None:
        table = layer.table.upto(layer.reach(keys.shape[2]), keys.device, keys.dtype)
        query, lookup = rotate(query, held, chunk, layer.plan.positions, layer.span, layer.budget, table)
    seeing_all = chunk.new == 1 and layer.sliding is None and not vacant
    hidden = None if seeing_all else causal_mask(held, chunk, layer.sliding)
    return attention(query, keys, values, lookup, chunk, hidden, transform)


def attention_of_last_query(layer: HeadGroup, query: Tensor, transform: LogitTransform) -> Tensor:
    """What the newest token's query [B, Hq, 1, D] sees in what is held: probabilities [B, Hkv, G, 1, S]."""
    keys, values = layer.store.read()
    chunk = QueryChunk((1,), 1, query.device)
    return layer_attention(layer, query, keys, values, layer.places, chunk, transform)[1]


def _demote(layer: HeadGroup, store: QuantizedStore) -> None:
    """Vacate the seat of the next token: the oldest of the ring is encoded and moves to the free slot."""
    ring = layer.ring(layer.seen).expand_as(layer.free)
    store.demote(ring, layer.free, layer.index >= 0)
    if layer.policy.long_term:
        layer.long_term_scores.scatter_(2, layer.free, layer.long_term_scores.gather(2, ring))
    for book, empty in ((layer.scores, -torch.inf), (layer.index, -1), (layer.rank, store.slots)):
        book.scatter_(2, layer.free, book.gather(2, ring))
        book.scatter_(2, ring, empty)


def _evict(layer: HeadGroup, evictions: Sequence[int]) -> None:
    """Evict the tokens worth least, so many of each row, and make the last one's slot the free slot.

    A row that evicts none finds an empty slot. Sinks and the ring of new tokens are not asked. In a window of one size
    an empty slot is always require_tensor first.
    """
    first, most, fixed = layer.store.exact, max(evictions), layer.schedule.fixed
    uneven = None
    if not fixed and min(evictions) < most:
        uneven = torch.tensor(evictions, device=layer.free.device).view(-1, 1, 1)
    for done in range(max(most, 1)):
        worth = layer.policy.worth(layer.places, layer.budget)
        if uneven is not None:
            worth.masked_fill_((layer.index < 0) & (uneven > done), torch.inf)
        elif most and not fixed:
            worth.masked_fill_(layer.index < 0, torch.inf)
        least = worth[..., first:].argmin(-1, keepdim=True).add_(first)
        if uneven is not None and done:
            least = torch.where(uneven > done, least, layer.free)
        layer.free.copy_(least)
        layer.rank -= (layer.rank > layer.rank.gather(2, least)).int()
        layer.rank.scatter_(2, least, layer.store.slots)
        layer.index.scatter_(2, least, -1)
        layer.scores.scatter_(2, least, -torch.inf)


def _hold(layer: HeadGroup, keep: Tensor, index: Tensor, keys: Tensor, values: Tensor, held: Candidates) -> None:
    """Keep the places `keep` [B, Hkv, n], in token order, and no other; none where `index` is -1."""
    n, store, slots = keep.shape[-1], layer.store, layer.store.slots
    keys, values = (x.gather(2, keep[..., None].expand(-1, -1, -1, x.shape[-1])) for x in (keys, values))
    order, slot, first = torch.arange(n, device=keep.device), None, n
    if isinstance(store, QuantizedStore):
        ring = store.residual - 1
        slot = torch.where(order < n - ring, store.exact - store.sinks + order, layer.ring(layer.seen - n + order))
        slot = torch.where(index < store.sinks, index, slot).masked_fill(index < 0, slots)
        store.hold(slot, keys, values)
        first = max(n + 1, store.exact)
    else:
        store.hold(keys, values)

    def place(book: Tensor, x: Tensor, empty: float) -> None:
        if slot is None:
            book[..., :n].copy_(x.masked_fill(index < 0, empty))
            book[..., n:].fill_(empty)
        else:
            book.copy_(x.new_full((*x.shape[:2], slots + 1), empty).scatter_(2, slot, x)[..., :slots])

    place(layer.index, index, -1)
    place(layer.scores, held.scores.gather(2, keep), -torch.inf)
    if held.long_term_scores is not None:
        place(layer.long_term_scores, held.long_term_scores.gather(2, keep), 0.0)
    place(layer.rank, (n - 1 - order).int().expand_as(keep), slots)
    layer.free.fill_(first)
    layer.filled = n
