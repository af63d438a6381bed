"""The likeliest tokens of a vocabulary, without sorting all of it."""

from __future__ import annotations

import numpy as np

from h2o_stream.engine.logits import Scores, TokenIds

_NUCLEUS_CUTOFFS = 1e-4, 1e-6, 1e-45
"""The nucleus is searched among tokens above the first probability, then above the second, then among all that have
one: float32 has no smaller number than the third."""

_BLOCKS = 1024
"""Blocks of scores whose peaks bound the largest scores: partitioning all of them takes longer than all else."""


def nucleus(scores: Scores, top_p: float) -> TokenIds:
    """Indices of the likeliest tokens that together reach `top_p`, below 1, in ascending order. Scores are logits.

    Among equally likely tokens, the first ones are included. All tokens are sorted, as in transformers, only if the
    likely ones are not enough.
    """
    probs = relative(scores)
    probs /= probs.sum()
    for cutoff in _NUCLEUS_CUTOFFS:
        ids = at_least(probs, cutoff)
        order = ids[(-scores[ids]).argsort(kind="stable")]
        mass = probs[order].cumsum(dtype=np.float64)
        if len(mass) and mass[-1] >= top_p:
            break
    return np.sort(order[: mass.searchsorted(top_p) + 1])


def relative(scores: Scores) -> Scores:
    """Probabilities by that of the likeliest token, 0 to 1, of scores [n]."""
    ratios: Scores = np.exp(scores - scores.max())
    return ratios


def largest(scores: Scores, count: int) -> float:
    """The smallest of the `count` largest scores. All of them are partitioned only if they are few: that is slow."""
    count, width = min(count, len(scores)), max(len(scores) // _BLOCKS, 1)
    peaks = np.maximum.reduceat(scores, np.arange(0, len(scores), width))
    if count < len(peaks):
        scores = scores[scores >= np.partition(peaks, -count)[-count]]
    return float(np.partition(scores, -count)[-count])


def at_least(scores: Scores, threshold: float) -> TokenIds:
    """Indices of the scores [n] that are at least the threshold, in ascending order."""
    return (scores >= threshold).nonzero()[0]
