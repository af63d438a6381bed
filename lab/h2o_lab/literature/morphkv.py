"""``morphkv``: what any of the newest queries attends to."""

from __future__ import annotations

from torch import Tensor

from h2o_lab.literature.observation import Observation
from h2o_stream.cache.policies.base import Candidates
from h2o_stream.config import PolicyDefaults


class MorphKV(Observation):
    """Old tokens are ranked by the attention of the recent window's queries only (MorphKV, arXiv 2503.00979).

    Of the paper's two ways to fuse the attention of these queries, sum and maximum, this is the maximum; over the
    query heads of a group it is the sum.

    Deliberate differences: the window has at most 32 queries, however large the recent budget. Their attention to the
    tokens that are held now is computed anew at each eviction, so that nothing is kept per slot.
    """

    defaults = PolicyDefaults(heavy_share=0.5, sinks=4, decay=1.0, positions="gap")

    def priority(self, candidates: Candidates) -> Tensor:
        """The largest attention of a query, 0 to G."""
        return self.attention(candidates).sum(2).amax(2)
