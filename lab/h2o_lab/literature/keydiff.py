"""``keydiff``: keys unlike the others."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import normalize

from h2o_lab.literature.similarity import unit_vectors
from h2o_stream.cache.policies.base import Candidates, Policy
from h2o_stream.config import PolicyDefaults


class KeyDiff(Policy):
    """A key that points where the others do leaves first (KeyDiff, arXiv 2504.15364).

    Similarity is the cosine between a key and the mean direction of all keys of its head. Deliberate differences: keys
    are compared before RoPE (after it only with ``absolute``), sinks and the newest tokens stay, and a reply evicts
    token by token.
    """

    defaults = PolicyDefaults(heavy_share=0.5, sinks=4, decay=1.0, positions="gap")

    needs_attention = False
    needs_keys = True

    def priority(self, candidates: Candidates) -> Tensor:
        """Minus the cosine, -1 to 1."""
        directions = unit_vectors(candidates.keys, candidates.index)
        anchor = normalize(directions.sum(2, keepdim=True), dim=-1)
        return (directions * anchor).sum(-1).neg()
