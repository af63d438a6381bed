"""``moments``: the choice of ``h2o``, and the moments of the keys and values that were evicted."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from h2o_stream.cache.policies.base import Candidates, Folded
from h2o_stream.cache.policies.compensation import Compensation


class Moments(Compensation):
    """Count, mean key, mean value and value-key covariance of what was evicted (MomentKV, arXiv 2606.01563).

    Values count by the exponential of their keys' products with a query. To first order, their weighted mean is the
    mean value plus the covariance times the query; the mean of the exponentials is that of the mean key. Keys are
    placed as in `Compensation`. The covariance has D x Dv floats for each head: as much memory as D / 2 tokens.

    Deliberate differences: tokens are chosen as with ``h2o``, where the paper prefers to evict what the moments
    describe well. Only the abstract was followed. A second-order mean of the exponentials, with the covariance of the
    keys, was tried and left out, because it weighs the evicted tokens far too much.
    """

    def head_state(self, queries_per_key: int, key_size: int, value_size: int) -> dict[str, Tensor]:
        """Those of `Compensation`, and the covariance [Dv, D]; see `Policy.head_state`."""
        state = super().head_state(queries_per_key, key_size, value_size)
        return state | {"folded_covariance": torch.zeros(value_size, key_size, dtype=torch.float32, device="cpu")}

    def fold(self, candidates: Candidates, evicted: Tensor) -> dict[str, Tensor]:
        """Moments about the new means; see `Policy.fold`."""
        before, after = candidates.head_state, super().fold(candidates, evicted)
        assert candidates.keys is not None
        assert candidates.values is not None
        keys, values = candidates.keys.float(), candidates.values.float()
        keys = keys - before["folded_key"].unsqueeze(2)
        values = (values - before["folded_value"].unsqueeze(2)) * evicted.unsqueeze(-1)
        summed = before["folded_covariance"] * before["folded_count"].unsqueeze(-1) + values.mT @ keys
        moved_key, moved_value = (after[name] - before[name] for name in ("folded_key", "folded_value"))
        covariance = summed / after["folded_count"].clamp_min(1).unsqueeze(-1)
        return after | {"folded_covariance": covariance - moved_value.unsqueeze(-1) * moved_key.unsqueeze(-2)}

    def folded(self, head_state: Mapping[str, Tensor], queries: Tensor, seen: Tensor, table: Tensor | None) -> Folded:
        """The token of `Compensation`, with the value moved toward the query; see `Policy.folded`."""
        folded = super().folded(head_state, queries, seen, table)
        covariance = self.placed(head_state, head_state["folded_covariance"], seen, table)
        return Folded(folded.logits, folded.values + queries @ covariance.mT.unsqueeze(2))
