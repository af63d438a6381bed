"""How sure a mean difference is: a bootstrap over blocks, since neighbouring tokens are not independent."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64
"""Tokens that are drawn together."""

_DRAWS = 2000


class Interval(NamedTuple):
    """A mean and the range that holds 95% of its resampled values."""

    mean: float
    low: float
    high: float


def paired_difference(ours: Tensor, theirs: Tensor, block: int = BLOCK, seed: int = 0) -> Interval:
    """The mean of ours - theirs, token by token, with its 95% interval.

    Args:
        ours: [n] losses.
        theirs: [m] losses of the same tokens; what one of them has more is left out.
        block: tokens drawn together; the last, shorter block counts as one.
        seed: of the draws, so that a figure does not change when it is computed again.
    """
    shared = min(len(ours), len(theirs))
    difference = (ours[:shared] - theirs[:shared]).double()
    sums = torch.stack([part.sum() for part in difference.split(block)])
    sizes = torch.tensor([len(part) for part in difference.split(block)], dtype=torch.float64)
    drawn = torch.randint(len(sums), (_DRAWS, len(sums)), generator=torch.Generator().manual_seed(seed))
    means = sums[drawn].sum(1) / sizes[drawn].sum(1)
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(float(difference.mean()), low, high)
