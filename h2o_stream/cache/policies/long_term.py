"""``h2o``: the attention a token has received lately, and how sharply it was ever attended to from afar."""

from __future__ import annotations

from torch import Tensor

from h2o_stream.cache.policies.accumulated import Accumulated
from h2o_stream.cache.policies.base import Attention, Candidates, faded
from h2o_stream.config import CachePlan

FAR = 64
"""Tokens that lie between a token and what looks back at it from afar."""

DECAY = 0.999
"""Factor on the long-term score per token seen."""


class LongTerm(Accumulated):
    """Decayed sums as in `Accumulated`, and beside them a score that lasts ten times as long.

    What is quoted once is quoted again: the long-term score sums the squares of the attention that comes from afar, so
    that being found once counts and being glanced at a hundred times does not.
    """

    def __init__(self, plan: CachePlan, layer: int = 0) -> None:
        super().__init__(plan, layer)
        self.long_term = plan.long_term > 0

    def update_long_term(self, long_term_scores: Tensor, held: Candidates, attention: Attention) -> Tensor:
        """Decay what was there, add the squares of what old tokens receive; see `Policy.update_long_term`.

        Old is what lies `FAR` tokens before the query, or before the first one of the `FAR` that it is one of.
        """
        before = held.seen - attention.new
        kept = long_term_scores * DECAY**attention.new
        for start in range(0, attention.probs.shape[-2], FAR):
            squares = attention.probs[..., start : start + FAR, :].square()
            if squares.shape[-2] == 1:
                received = squares.sum((2, 3))
            else:
                later = attention.later[..., start : start + FAR]
                received = (faded(DECAY, later).unsqueeze(-2) @ squares).squeeze(-2).sum(2)
            kept += received.mul_(held.index < before + start - FAR)
        return kept

    def priority(self, held: Candidates) -> Tensor:
        """Both scores."""
        return held.scores if held.long_term_scores is None else held.scores + self.plan.long_term * held.long_term_scores
