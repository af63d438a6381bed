"""One decoder layer of the fixed-window cache: W + 1 slots that are written in place.

Owns keys, values, scores, token indices and ranks of a layer, and the attention over them. Knows nothing of
the model around it: it is handed queries, keys and values and gives back the attention's output.

At rest at most W slots are held and `free` names one that is not. A decode step writes the new token there,
attends, updates the scores and evicts one slot, which is the next free one; nothing is copied or grown.
A prefill takes the prompt in chunks: attend to what is held and to the chunk, then keep W of both.
The two are the same rule, "append, attend, keep", and give the same result token by token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from h2o_stream.cache.policies import Scorer, protected, select
from h2o_stream.cache.rope import RotaryTable, distances, rotate_back
from h2o_stream.config import CachePlan
from h2o_stream.errors import H2OStreamError

_STATE = ("keys", "values", "scores", "index", "rank", "free")


class SlotLayer(CacheLayerMixin):
    """Fixed slots of one layer.

    Attributes:
        keys: [B, Hkv, S, D], S = window + 1; un-rotated, or rotated at token indices with ``absolute``.
        values: [B, Hkv, S, D].
        scores: [B, Hkv, S] float32, -inf where empty.
        index: [B, Hkv, S] int64 token index, -1 where empty.
        rank: [B, Hkv, S] int64, held keys newer than this one; S or more where empty.
        free: [B, Hkv, 1] int64, the slot the next token is written to.
        seen: tokens fed since the last reset.
        pinned: leading tokens that are never evicted; at least the plan's sinks.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, plan: CachePlan, scorer: Scorer, table: RotaryTable | None) -> None:
        super().__init__()
        self.plan = plan
        self.scorer = scorer
        self.table = table
        self.pinned = plan.sinks
        self.recent = plan.recent
        self.seen = 0

    # transformers' interface

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate every slot, in the dtype and on the device of the first keys [B, Hkv, Q, D]."""
        batch, heads = key_states.shape[:2]
        slots, device = self.plan.window + 1, key_states.device
        self.dtype, self.device = key_states.dtype, device
        self.keys = key_states.new_zeros(batch, heads, slots, key_states.shape[-1])
        self.values = value_states.new_zeros(batch, heads, slots, value_states.shape[-1])
        self.scores = torch.empty(batch, heads, slots, dtype=torch.float32, device=device)
        self.index = torch.empty(batch, heads, slots, dtype=torch.int64, device=device)
        self.rank = torch.empty_like(self.index)
        self.free = torch.empty(batch, heads, 1, dtype=torch.int64, device=device)
        self.is_initialized = True
        self._vacate(0)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand the new keys and values on: `attend` stores them once their attention is known."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens seen, evicted ones included: what `generate` counts with."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of a mask; ours are made in `attend`."""
        return query_length, 0

    def get_max_length(self) -> int:
        """No limit: the stream is endless."""
        return -1

    def reset(self) -> None:
        """Forget the stream and release the slots."""
        self.seen = 0
        self.is_initialized = False
        for name in _STATE:
            setattr(self, name, None)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row beam_idx[i], scores and ranks included."""
        if self.is_initialized:
            for name in _STATE:
                setattr(self, name, getattr(self, name).index_select(0, beam_idx.to(self.device)))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what was evicted for the removed tokens does not come back."""
        raise H2OStreamError("a cache that evicts cannot take tokens back; generate without an assistant model")

    # what is held

    @property
    def held(self) -> int:
        """Tokens held per head."""
        return min(self.seen, self.plan.window)

    @property
    def nbytes(self) -> int:
        """Bytes of everything allocated for this layer."""
        return sum(getattr(self, name).nbytes for name in _STATE) if self.is_initialized else 0

    def kept(self) -> Tensor:
        """[B, Hkv, held] int64 token indices, oldest first."""
        if not self.is_initialized:
            return torch.empty(0, 0, 0, dtype=torch.int64)
        return self.index.sort(-1).values[..., self.plan.window + 1 - self.held :]

    # attention

    @torch.no_grad()
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend with Q new tokens, then hold at most `window` of all.

        Args:
            query: [B, Hq, Q, D], un-rotated like the keys (rotated already with ``absolute``).
            key: [B, Hkv, Q, D].
            value: [B, Hkv, Q, D].
            scaling: factor on the query-key products.

        Returns:
            [B, Q, Hq, D], in the query's dtype.
        """
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        chunk = self.plan.chunk or key.shape[2]
        steps = zip(query.split(chunk, 2), key.split(chunk, 2), value.split(chunk, 2), strict=True)
        outputs = [
            self._decode(q, k, v, scaling) if k.shape[2] == 1 else self._prefill(q, k, v, scaling) for q, k, v in steps
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _decode(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        place = self.free[..., None].expand(-1, -1, -1, key.shape[-1])
        self.keys.scatter_(2, place, key)
        self.values.scatter_(2, place, value)
        self.index.scatter_(2, self.free, self.seen)
        self.scores.scatter_(2, self.free, 0.0)
        self.rank += 1
        self.rank.scatter_(2, self.free, 0)
        self.seen += 1

        output, probs = self._weigh(query, self.keys, self.values, self.index, self.rank, scaling)
        if self.scorer.observes:
            self.scores = self.scorer.observe(self.scores, probs)
        self._evict()
        return output

    def _evict(self) -> None:
        """Make the slot worth least, or an empty one, the free slot."""
        worth = self.scorer.priority(self.scores, self.rank)
        worth = worth.masked_fill(protected(self.index, self.rank, self.pinned, self.recent), torch.inf)
        if self.seen <= self.plan.window:
            worth = worth.masked_fill_(self.index < 0, -torch.inf)
        self.free = worth.argmin(-1, keepdim=True)
        self.rank -= (self.rank > self.rank.gather(2, self.free)).long()
        self.rank.scatter_(2, self.free, self.plan.window + 1)
        self.index.scatter_(2, self.free, -1)
        self.scores.scatter_(2, self.free, -torch.inf)

    def _prefill(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        new, used = key.shape[2], min(self.seen, self.plan.window + 1)
        shape = (*key.shape[:2], new)
        keys = torch.cat((self.keys[:, :, :used], key), dim=2)
        values = torch.cat((self.values[:, :, :used], value), dim=2)
        fresh = torch.arange(self.seen, self.seen + new, device=key.device)
        index = torch.cat((self.index[..., :used], fresh.expand(shape)), dim=2)
        newer = torch.arange(new - 1, -1, -1, device=key.device)
        rank = torch.cat((self.rank[..., :used] + new, newer.expand(shape)), dim=2)
        scores = torch.cat((self.scores[..., :used], self.scores.new_zeros(shape)), dim=2)
        self.seen += new

        output, probs = self._weigh(query, keys, values, index, rank, scaling)
        if self.scorer.observes:
            scores = self.scorer.observe(scores, probs)
        safe = protected(index, rank, self.pinned, self.recent)
        keep = select(self.scorer.priority(scores, rank), index, safe, self.held)
        self._hold(keep, keys, values, scores, index)
        return output

    def _hold(self, keep: Tensor, keys: Tensor, values: Tensor, scores: Tensor, index: Tensor) -> None:
        """Write the places `keep` [B, Hkv, n], in token order, to the first n slots."""
        held = keep.shape[-1]
        for slots, source in ((self.keys, keys), (self.values, values)):
            slots[:, :, :held] = source.gather(2, keep[..., None].expand(-1, -1, -1, source.shape[-1]))
        self.scores[..., :held] = scores.gather(2, keep)
        self.index[..., :held] = index.gather(2, keep)
        self.rank[..., :held] = torch.arange(held - 1, -1, -1, device=self.device)
        self._vacate(held)

    def _vacate(self, held: int) -> None:
        """Mark every slot from `held` on as empty."""
        self.index[..., held:] = -1
        self.scores[..., held:] = -torch.inf
        self.rank[..., held:] = self.plan.window + 1
        self.free.fill_(held)

    def _weigh(
        self, query: Tensor, keys: Tensor, values: Tensor, index: Tensor, rank: Tensor, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """Causal attention of the newest Q tokens over the slots given.

        Returns:
            Output [B, Q, Hq, D] and float32 probabilities [B, Hkv, G, Q, K].
        """
        batch, query_heads, new, size = query.shape
        kv_heads, visible = keys.shape[1:3]
        if self.table is not None:
            query, keys = self._rotate(query, keys, index, rank)
        grouped = query.reshape(batch, kv_heads, -1, size)
        logits = torch.matmul(grouped, keys.transpose(2, 3)).float() * scaling
        logits = logits.view(batch, kv_heads, query_heads // kv_heads, new, visible)
        if new > 1 or self.seen < visible:
            asked_at = torch.arange(self.seen - new, self.seen, device=query.device)
            hidden = (index < 0)[:, :, None, :] | (index[:, :, None, :] > asked_at[:, None])
            logits = logits.masked_fill_(hidden[:, :, None], -torch.inf)
        probs = logits.softmax(-1)
        output = torch.matmul(probs.to(values.dtype).flatten(2, 3), values)
        output = output.view(batch, query_heads, new, values.shape[-1]).transpose(1, 2)
        return output, probs

    def _rotate(self, query: Tensor, keys: Tensor, index: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
        assert self.table is not None
        new, plan = query.shape[2], self.plan
        reach = plan.window + 1 + new + (plan.span if plan.positions == "gap" else 0)
        behind = distances(plan, self.seen - 1 - index, rank).clamp_(0, reach - 1)
        keys = rotate_back(keys, self.table.lookup(behind, keys.dtype, reach))
        if new > 1:
            ahead = torch.arange(new - 1, -1, -1, device=query.device)
            query = rotate_back(query, self.table.lookup(ahead, query.dtype, reach))
        return query, keys
