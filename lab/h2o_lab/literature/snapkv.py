"""``snapkv``: what the newest queries attend to, and its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from h2o_lab.literature.observation import Observation
from h2o_stream.cache.policies.base import Candidates
from h2o_stream.config import PolicyDefaults


@dataclass(eq=False)
class SnapKV(Observation):
    """The attention of an observation window of the newest queries, pooled over neighbours (SnapKV, arXiv 2404.14469).

    The score of a token is the attention that all queries of the window pay to it, and then the largest score among
    the tokens held around it. The tokens of the window do not take part.

    Deliberate differences: the paper compresses a prompt once; here the window moves on, and each eviction scores
    anew. The query heads of a group choose together. Neighbours often share a score; the older one then stays.

    Args:
        pooled: neighbouring tokens that share the largest score among them.
    """

    pooled: int = 7

    defaults = PolicyDefaults(heavy_share=0.5, sinks=4, decay=1.0, positions="gap")

    def priority(self, candidates: Candidates) -> Tensor:
        """Minus the number of tokens of the head that are worth more."""
        scores = self.attention(candidates).sum((2, 3))
        scores = scores.masked_fill(candidates.index >= candidates.seen - self.observed, 0.0)
        order = candidates.index.argsort(-1)
        pooled = max_pool1d(scores.gather(-1, order), self.pooled, stride=1, padding=self.pooled // 2)
        better = pooled.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        return torch.empty_like(pooled).scatter_(-1, order, -better.float())
