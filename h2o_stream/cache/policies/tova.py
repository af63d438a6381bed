"""``tova``: the attention of the newest token."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_stream.cache.policies.base import Attention, Candidates, Policy


class Tova(Policy):
    """Token omission via attention (arXiv 2401.06104): the score is the attention of the last query alone.

    Deliberate difference to the paper: every KV head chooses by itself, by the sum over its query heads; the paper
    averages over all heads of a layer.
    """

    def update_scores(self, scores: Tensor, attention: Attention) -> Tensor:
        """The attention of the last query; a row without new tokens keeps its scores. See `Policy.update_scores`."""
        if isinstance(attention.new, int):
            received = attention.probs[..., -1, :].sum(2)
        else:
            last = (attention.later == 0).unsqueeze(-1)
            received = torch.where(attention.new > 0, (attention.probs * last).sum((2, 3)), scores)
        return received.masked_fill(scores == -torch.inf, -torch.inf)

    def total(self, seen: Tensor) -> Tensor:
        """The last query adds 1; see `Policy.total`."""
        return torch.ones_like(seen, dtype=torch.float64)

    def priority(self, candidates: Candidates) -> Tensor:
        """The score itself."""
        return candidates.scores
