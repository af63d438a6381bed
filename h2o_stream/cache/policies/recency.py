"""``recent`` and ``sink``: sliding windows, without or with the first tokens of the stream."""

from __future__ import annotations

from torch import Tensor

from h2o_stream.cache.policies.base import Candidates, Policy


class Recency(Policy):
    """The oldest unprotected token leaves first (StreamingLLM, arXiv 2309.17453, when there are sinks)."""

    needs_attention = False

    def priority(self, candidates: Candidates) -> Tensor:
        """Newer is worth more."""
        return candidates.rank.neg().float()
