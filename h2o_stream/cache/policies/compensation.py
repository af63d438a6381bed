"""``compensation``: the choice of ``h2o``, and a token that stands for all evicted ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from h2o_stream.cache.policies.base import Candidates, Folded
from h2o_stream.cache.policies.long_term import LongTerm
from h2o_stream.cache.rope import distances, rotate_back


class Compensation(LongTerm):
    """One compensation token per head: the mean of the evicted keys and values, by their count (arXiv 2407.15891).

    The mean is one of keys before RoPE, and stands where their mean token index does: with ``gap`` at most as far as a
    full window behind the span, with ``rolling`` behind a full window. With ``absolute`` it is one of rotated keys.

    Deliberate differences to RazorAttention: every head has such a token and evicts as with ``h2o``, where the paper
    evicts by age, in heads that do not retrieve, and keeps everything in those that do. Soft-capping is left out.
    """

    needs_keys = True
    folds = True

    def head_state(self, queries_per_key: int, key_size: int, value_size: int) -> dict[str, Tensor]:
        """Count, sum of token indices, mean key [D] and mean value [Dv]; see `Policy.head_state`."""
        return {
            "folded_count": torch.zeros(1, dtype=torch.int64, device="cpu"),
            "folded_indices": torch.zeros(1, dtype=torch.int64, device="cpu"),
            "folded_key": torch.zeros(key_size, dtype=torch.float32, device="cpu"),
            "folded_value": torch.zeros(value_size, dtype=torch.float32, device="cpu"),
        }

    def fold(self, candidates: Candidates, evicted: Tensor) -> dict[str, Tensor]:
        """Running means; see `Policy.fold`."""
        state = candidates.head_state
        assert candidates.keys is not None
        assert candidates.values is not None
        count = state["folded_count"] + evicted.sum(-1, keepdim=True)
        weights = (evicted / count.clamp_min(1)).unsqueeze(2)
        folded = {
            "folded_count": count,
            "folded_indices": state["folded_indices"] + (candidates.index * evicted).sum(-1, keepdim=True),
        }
        for name, x in (("folded_key", candidates.keys.float()), ("folded_value", candidates.values.float())):
            folded[name] = state[name] + (weights @ (x - state[name].unsqueeze(2))).squeeze(2)
        return folded

    def folded(self, head_state: Mapping[str, Tensor], queries: Tensor, seen: Tensor, table: Tensor | None) -> Folded:
        """The product with the mean key plus the logarithm of the count; see `Policy.folded`."""
        key = self.placed(head_state, head_state["folded_key"], seen, table)
        logits = (queries @ key[:, :, None, :, None]).squeeze(-1) + head_state["folded_count"].unsqueeze(-1).log()
        return Folded(logits, head_state["folded_value"][:, :, None, None].expand(*logits.shape, -1))

    def placed(self, head_state: Mapping[str, Tensor], x: Tensor, seen: Tensor, table: Tensor | None) -> Tensor:
        """Keys [B, Hkv, *, D], rotated to the place of the evicted tokens."""
        if table is None:
            return x
        age = seen - 1 - head_state["folded_indices"] // head_state["folded_count"].clamp_min(1)
        behind_all = torch.full_like(age, self.plan.window)
        rotation = table[distances(self.plan.positions, self.plan.span, age, behind_all)]
        return rotate_back(x, rotation if x.dim() == 4 else rotation.squeeze(2))
