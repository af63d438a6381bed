"""``value-redundancy``: attention received, less where a better token has a similar value."""

from __future__ import annotations

from torch import Tensor

from h2o_lab.literature.similarity import cosines
from h2o_stream.cache.policies.accumulated import Accumulated
from h2o_stream.cache.policies.base import Candidates
from h2o_stream.config import PolicyDefaults

PENALTY = 0.5
"""Part of the score that a token loses if another one has the same value. The weight is the paper's."""


class ValueRedundancy(Accumulated):
    """Decayed sums as in `Accumulated`, reduced by the similarity of values (arXiv 2605.14292, as its abstract says).

    The paper selects greedily, and the score of a token falls with the similarity of its value to those selected
    before. Deliberate differences: the score is attention received, the paper's that of `TriAttention`. What would be
    selected before a token is taken to be every token that stays anyway or has a higher score, so that no token waits
    for another. The penalty is a factor, which needs no scale for scores.
    """

    defaults = PolicyDefaults(heavy_share=0.5, sinks=4, decay=0.99, positions="gap")

    needs_keys = True

    def priority(self, candidates: Candidates) -> Tensor:
        """The score, times 1 down to 0.5."""
        scores, plan = candidates.scores, self.plan
        stays = (candidates.rank < plan.recent) | (candidates.index < plan.sinks)
        before = stays.unsqueeze(-2) | (scores.unsqueeze(-2) > scores.unsqueeze(-1))
        similarity = cosines(candidates.values, candidates.index)
        similarity.diagonal(dim1=-2, dim2=-1).zero_()
        return scores * (1 - PENALTY * similarity.masked_fill(~before, 0.0).amax(-1).clamp_min(0.0))
