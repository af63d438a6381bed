"""``r-kv``: attention received lately, less redundancy among keys."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from h2o_lab.literature.similarity import cosines
from h2o_stream.cache.policies.accumulated import Accumulated
from h2o_stream.cache.policies.base import Candidates
from h2o_stream.config import PolicyDefaults

IMPORTANCE = 0.1
"""Weight of importance; redundancy has the rest. The paper's choice."""

SIMILAR = 0.5
"""Cosine from which two keys are similar."""

POOLED = 7
"""Neighbouring tokens that share the largest importance among them."""


class RKV(Accumulated):
    """Importance against redundancy (R-KV, arXiv 2505.24133).

    Importance is the share of the attention of the last queries, the largest among neighbours. Redundancy is the mean
    cosine between a key and all others, as a softmax. The newest key of those similar to a key is not redundant to it.

    Deliberate differences: decaying sums take the place of the last 8 queries, whose mean age they have. Keys are
    compared before RoPE (after it only with ``absolute``), and a reply evicts token by token.
    """

    defaults = PolicyDefaults(heavy_share=0.5, sinks=4, decay=0.875, positions="gap")

    needs_keys = True

    def priority(self, candidates: Candidates) -> Tensor:
        """The weighted difference, -1 to 1."""
        return IMPORTANCE * _importance(candidates) - (1 - IMPORTANCE) * _redundancy(candidates)


def _importance(candidates: Candidates) -> Tensor:
    """[B, Hkv, K], scores as shares of their sum, pooled over neighbours in the order of tokens."""
    scores, order = candidates.scores.masked_fill(candidates.index < 0, 0.0), candidates.index.argsort(-1)
    shares = scores / scores.sum(-1, keepdim=True)
    pooled = max_pool1d(shares.gather(-1, order), POOLED, stride=1, padding=POOLED // 2)
    return torch.empty_like(pooled).scatter_(-1, order, pooled)


def _redundancy(candidates: Candidates) -> Tensor:
    """[B, Hkv, K], summing to 1."""
    is_token = candidates.index >= 0
    similarity = cosines(candidates.keys, candidates.index)
    similarity.diagonal(dim1=-2, dim2=-1).zero_()
    index = candidates.index.unsqueeze(-2)
    similar = index.masked_fill(similarity <= SIMILAR, -1)
    newest = (similar == similar.amax(-1, keepdim=True)) & (similar >= 0)
    mean = similarity.masked_fill(newest, 0.0).sum(-2) / is_token.sum(-1, keepdim=True)
    return mean.masked_fill(~is_token, -torch.inf).softmax(-1)
