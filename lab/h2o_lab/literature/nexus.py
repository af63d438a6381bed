"""``nexus``: a random sample in which a token's chance to stay grows with the attention it has received."""

from __future__ import annotations

from torch import Tensor

from h2o_stream.cache.policies.accumulated import Accumulated
from h2o_stream.cache.policies.base import Candidates
from h2o_stream.cache.policies.random import uniform
from h2o_stream.config import PolicyDefaults


class Nexus(Accumulated):
    """Weighted reservoir sampling in place of the tokens of highest score (Nexus Sampling, arXiv 2606.23961).

    Every token draws a number u from (0, 1) once, and those with the largest u^(1/w) stay, where w is the attention
    received so far (algorithm A-Res of Efraimidis and Spirakis). So a token of small weight can outlive a heavier one.
    The draw is a hash of seed, token index, layer and head, so that it needs no state.

    Deliberate difference: the paper spreads attention by a random walk over the tokens before it samples ("Nexus
    scoring"); here the weights are the sums of `Accumulated`.
    """

    defaults = PolicyDefaults(heavy_share=0.5, sinks=4, decay=0.99, positions="gap", draws=True)

    def priority(self, candidates: Candidates) -> Tensor:
        """The weight divided by -log(u), which orders tokens as u^(1/w) does and does not round to 1."""
        drawn = uniform(candidates.index, 0x9E3779B9 * self.plan.seed, self.layer).double()
        return candidates.scores / (drawn + 2.0**-25).log().neg().float()
