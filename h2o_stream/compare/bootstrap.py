"""Confidence intervals by a block bootstrap, since the losses of neighbouring tokens are not independent."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64
"""Tokens resampled together."""

_RESAMPLES = 2000


class Interval(NamedTuple):
    """A mean and its 95% interval."""

    mean: float
    low: float
    high: float


def paired_difference(ours: Tensor, theirs: Tensor, block: int = BLOCK, seed: int = 0) -> Interval:
    """The mean of ours - theirs over tokens, with its 95% interval.

    Args:
        ours: [n] losses.
        theirs: [m] losses of the same tokens; the longer tensor is truncated.
        block: tokens resampled together; the last block may be shorter.
        seed: of the resampling.
    """
    length = min(len(ours), len(theirs))
    difference = (ours[:length] - theirs[:length]).double()
    sums = torch.stack([chunk.sum() for chunk in difference.split(block)])
    sizes = torch.tensor([len(chunk) for chunk in difference.split(block)], dtype=torch.float64)
    samples = torch.randint(len(sums), (_RESAMPLES, len(sums)), generator=torch.Generator().manual_seed(seed))
    means = sums[samples].sum(1) / sizes[samples].sum(1)
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(float(difference.mean()), low, high)
