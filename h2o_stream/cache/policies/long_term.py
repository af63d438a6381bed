"""``h2o``: recent attention, and how sharply a token was ever attended to from a distance."""

from __future__ import annotations

from torch import Tensor

from h2o_stream.cache.policies.accumulated import Accumulated
from h2o_stream.cache.policies.base import Attention, Candidates
from h2o_stream.config import LONG_TERM_DECAY, LONG_TERM_DISTANCE


class LongTerm(Accumulated):
    """Decayed sums as in `Accumulated`, plus a score that lasts ten times as long.

    What is quoted once is quoted again: the long-term score sums the squares of attention from a distance, so that one
    sharp look counts and a hundred glances do not.
    """

    def __post_init__(self) -> None:
        self.long_term = self.plan.long_term > 0

    def update_long_term(self, long_term_scores: Tensor, candidates: Candidates, attention: Attention) -> Tensor:
        """Decay the scores, add the squares of the attention to distant tokens; see `Policy.update_long_term`.

        Distant is `LONG_TERM_DISTANCE` tokens before the query; as many queries are taken together, and the first one
        counts.
        """
        far, decay = LONG_TERM_DISTANCE, LONG_TERM_DECAY
        before = candidates.seen - attention.new
        kept = long_term_scores * decay**attention.new
        for start in range(0, attention.probs.shape[-2], far):
            squares = attention.probs[..., start : start + far, :].square()
            if squares.shape[-2] == 1:
                received = squares.sum((2, 3))
            else:
                later = attention.later[..., start : start + far]
                received = ((decay**later).unsqueeze(-2) @ squares).squeeze(-2).sum(2)
            kept += received.mul_(candidates.index < before + start - far)
        return kept

    def priority(self, candidates: Candidates) -> Tensor:
        """The sum of both scores."""
        scores, long_term = candidates.scores, candidates.long_term_scores
        return scores if long_term is None else scores + self.plan.long_term * long_term
