"""``moments``: the choice of ``h2o``, and the moments of the keys and values that were evicted."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from h2o_stream.cache.policies.base import Candidates, Folded, NewQueries
from h2o_stream.cache.policies.compensation import Compensation, keys_at_eviction


class Moments(Compensation):
    """Count, mean key, mean value and value-key covariance of what was evicted (MomentKV, arXiv 2606.01563).

    For a query, values count by the exponential of their keys' products with it; to first order, their weighted mean
    is the mean value plus the covariance times the query. Keys are placed as in `Compensation`. The covariance takes
    as much memory as 32 tokens of 64 channels do.

    Deliberate differences: tokens are chosen as with ``h2o``, where the paper prefers to evict what the moments
    describe well.
    """

    def head_state(self, queries_per_key: int, key_size: int, value_size: int) -> dict[str, Tensor]:
        """Those of `Compensation`, and the covariance [Dv, D]; see `Policy.head_state`."""
        state = super().head_state(queries_per_key, key_size, value_size)
        return state | {"folded_covariance": torch.zeros(value_size, key_size)}

    def fold(self, candidates: Candidates, evicted: Tensor) -> dict[str, Tensor]:
        """Moments about the new means; see `Policy.fold`."""
        before, after = candidates.head_state, super().fold(candidates, evicted)
        assert candidates.values is not None
        count = after["folded_count"].clamp_min(1).unsqueeze(-1)
        keys = keys_at_eviction(candidates) - before["folded_key"].unsqueeze(2)
        values = (candidates.values.float() - before["folded_value"].unsqueeze(2)) * evicted.unsqueeze(-1)
        summed = before["folded_covariance"] * before["folded_count"].unsqueeze(-1) + values.mT @ keys
        moved_key, moved_value = (after[name] - before[name] for name in ("folded_key", "folded_value"))
        return after | {"folded_covariance": summed / count - moved_value.unsqueeze(-1) * moved_key.unsqueeze(-2)}

    def folded(self, head_state: Mapping[str, Tensor], new: NewQueries) -> Folded:
        """The token of `Compensation`, with the values turned toward the query; see `Policy.folded`."""
        folded = super().folded(head_state, new)
        turned = new.queries @ head_state["folded_covariance"].mT.unsqueeze(2)
        return Folded(folded.logits, folded.values + turned)
