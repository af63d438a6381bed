"""``lagkv``: keys and values that vary most, measured by those of the tokens after them."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_stream.cache.policies.base import Candidates, Policy
from h2o_stream.config import PolicyDefaults

SMALLEST_RANGE = 1e-6
"""What a channel is divided by at least: in a lag partition of one token it has no range."""


class LagKV(Policy):
    """Lag-relative information (LagKV, arXiv 2504.04704).

    Every channel is scaled by its minimum and maximum in the partition that follows. A token's score is the standard
    deviation over its scaled channels, as a softmax over its partition; those of keys and values are averaged.

    Deliberate differences: the paper cuts the text into partitions of equal length and compresses each once, by the
    next one. Here there are always two: what may be evicted, and the recent tokens that follow it. So the lag is the
    recent budget, every eviction scores anew, and memory does not grow. Keys are compared before RoPE (after it only
    with ``absolute``).
    """

    defaults = PolicyDefaults(heavy_share=0.5, sinks=4, decay=1.0, positions="gap")

    needs_attention = False
    needs_keys = True

    def priority(self, candidates: Candidates) -> Tensor:
        """The mean of the two scores, 0 to 1; 0 for sinks and recent tokens, which stay anyway."""
        lag = (candidates.index >= 0) & (candidates.rank < self.plan.recent)
        partition = (candidates.index >= self.plan.sinks) & ~lag
        return (_score(candidates.keys, partition, lag) + _score(candidates.values, partition, lag)) / 2


def _score(x: Tensor | None, partition: Tensor, lag: Tensor) -> Tensor:
    """Scores [B, Hkv, K] of keys or values [B, Hkv, K, D]; `partition` and `lag` are bool [B, Hkv, K]."""
    assert x is not None
    x = x.float()
    low = x.masked_fill(~lag[..., None], torch.inf).amin(2, keepdim=True)
    high = x.masked_fill(~lag[..., None], -torch.inf).amax(2, keepdim=True)
    deviation = ((x - low) / (high - low).clamp_min(SMALLEST_RANGE)).std(-1)
    return deviation.masked_fill(~partition, -torch.inf).softmax(-1).masked_fill(~partition, 0.0)
