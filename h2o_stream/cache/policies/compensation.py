"""``compensation``: the choice of ``h2o``, and a token that stands for all evicted ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import embedding

from h2o_stream.cache.policies.base import Candidates, Folded, NewQueries
from h2o_stream.cache.policies.long_term import LongTerm
from h2o_stream.cache.rope import rotate_back


class Compensation(LongTerm):
    """One compensation token per head: the mean of the evicted keys and values, by their count (arXiv 2407.15891).

    A key is rotated by its distance at the moment of its eviction before it enters the mean, and the mean is seen by
    every query as it is. So its distance never grows, and no position is beyond those that the cache uses anyway.

    Deliberate differences to RazorAttention: every head has such a token and evicts as with ``h2o``, where the paper
    evicts by age, in heads that do not retrieve, and keeps everything in those that do. Soft-capping is left out.
    """

    needs_keys = True
    folds = True

    def head_state(self, queries_per_key: int, key_size: int, value_size: int) -> dict[str, Tensor]:
        """Count, mean key [D] and mean value [Dv]; see `Policy.head_state`."""
        return {
            "folded_count": torch.zeros(1),
            "folded_key": torch.zeros(key_size),
            "folded_value": torch.zeros(value_size),
        }

    def fold(self, candidates: Candidates, evicted: Tensor) -> dict[str, Tensor]:
        """Running means; see `Policy.fold`."""
        state, keys = candidates.head_state, keys_at_eviction(candidates)
        assert candidates.values is not None
        count = state["folded_count"] + evicted.sum(-1, keepdim=True)
        weights = (evicted / count.clamp_min(1)).unsqueeze(2)
        moved = {}
        for name, x in (("folded_key", keys), ("folded_value", candidates.values.float())):
            moved[name] = state[name] + (weights @ (x - state[name].unsqueeze(2))).squeeze(2)
        return {"folded_count": count} | moved

    def folded(self, head_state: Mapping[str, Tensor], new: NewQueries) -> Folded:
        """The product with the mean key plus the logarithm of the count; see `Policy.folded`."""
        count, key, value = (head_state[f"folded_{name}"][:, :, None, None] for name in ("count", "key", "value"))
        logits = (new.queries * key).sum(-1) + count.squeeze(-1).log()
        return Folded(logits, value.expand(*logits.shape, -1))


def keys_at_eviction(candidates: Candidates) -> Tensor:
    """Keys [B, Hkv, K, D] float32 as the newest query sees them."""
    assert candidates.keys is not None
    keys = candidates.keys.float()
    if candidates.rotations is None:
        return keys
    return rotate_back(keys, embedding(candidates.rotations.distance, candidates.rotations.table))
