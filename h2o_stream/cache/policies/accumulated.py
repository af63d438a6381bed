"""``h2o`` and ``h2o-paper``: the attention a token has received so far."""

from __future__ import annotations

from torch import Tensor

from h2o_stream.cache.policies.base import Attention, Candidates, Policy

MAX_DECAY_STEPS = 64
"""Within one forward decay stops after this many tokens, so that all of a prompt read at once counts."""


class Accumulated(Policy):
    """Attention received, summed over the query heads of the group and over time (H2O, arXiv 2306.14048).

    With a decay below 1 every later token shrinks what was summed before, so that old tokens cannot live
    on attention they got long ago. Deliberate difference to the published code: the whole group of
    query heads counts, not its first head.
    """

    def update_scores(self, scores: Tensor, attention: Attention) -> Tensor:
        """Decay the scores, add the attention of the new queries; see `Policy.update_scores`."""
        probs, decay = attention.probs, self.plan.decay
        if isinstance(attention.new, int) and attention.new == 1:
            return scores.mul(decay).add_(probs.sum((2, 3)))
        weights = decay ** attention.later.clamp(max=MAX_DECAY_STEPS)
        received = (weights.unsqueeze(-2) @ probs).squeeze(-2).sum(2)
        return received.add_(scores * decay**attention.new)

    def total(self, seen: Tensor) -> Tensor | None:
        """Every query adds 1, which decays; unknown if chunks are large. See `Policy.total`."""
        decay, seen = self.plan.decay, seen.double()
        if decay < 1 and not 0 < self.plan.chunk <= MAX_DECAY_STEPS:
            return None
        return seen if decay == 1 else (1 - decay**seen) / (1 - decay)

    def priority(self, candidates: Candidates) -> Tensor:
        """The score itself."""
        return candidates.scores
