"""``expected-attention``: the attention that queries to come are expected to pay."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_lab.literature.query_moments import QueryMoments, keys_ahead
from h2o_stream.cache.policies.base import Candidates
from h2o_stream.config import PolicyDefaults

AHEAD = 512
"""Tokens to come that are taken to ask."""


class ExpectedAttention(QueryMoments):
    """Expected attention of Gaussian queries (arXiv 2510.00636; also in NVIDIA's kvpress).

    The expectation of exp(q k) over queries of a mean and a covariance, both averaged over the positions to come, as a
    softmax over the tokens, times the norm of the value; a mean over the query heads of the group.

    Deliberate differences: the moments are those of all queries of the stream so far. Of the covariance only the
    diagonal counts, because all of it would take more memory than the slots of a small window. A reply evicts token by
    token.
    """

    defaults = PolicyDefaults(heavy_share=0.5, sinks=4, decay=1.0, positions="gap")

    def priority(self, candidates: Candidates) -> Tensor:
        """The logarithm of the expected norm of what a token adds to the output; the weight may be below any float."""
        assert candidates.values is not None
        mean, square = candidates.head_state["query_mean"], candidates.head_state["query_square"]
        keys = keys_ahead(candidates, torch.arange(1.0, AHEAD + 1, device=mean.device))
        variance = (square - mean.square()).clamp_min(0.0)
        logits = mean @ keys.mT + variance @ keys.square().mT / 2
        counts = (candidates.index >= self.plan.sinks).unsqueeze(2)
        weights = logits.masked_fill(~counts, -torch.inf).log_softmax(-1).logsumexp(2)
        norms: Tensor = candidates.values.float().norm(dim=-1)
        return weights + norms.log()
