"""What H2O observed about attention (arXiv 2306.14048, section 3), measured while a cache is used."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NEGLIGIBLE = 0.01
"""Attention below this part of the query's largest counts as none: the paper's threshold for sparsity."""

_EVERY = 16
"""Decode steps between two samples of the attention."""


def sparsity(probs: Tensor, visible: Tensor) -> Tensor:
    """The part of what each query sees that it all but ignores.

    Args:
        probs: [..., K] attention probabilities.
        visible: [..., K] bool, what the query may see.

    Returns:
        [...] float32, 0 to 1.
    """
    ignored = (probs < NEGLIGIBLE * probs.amax(-1, keepdim=True)) & visible
    return ignored.sum(-1) / visible.sum(-1).clamp_min(1)


def power_law(scores: Tensor) -> float:
    """The exponent a of score ~ rank ** -a, by least squares in logarithms; NaN for fewer than three scores.

    Args:
        scores: [n], in any order; those that are not positive are left out.
    """
    ordered = scores[scores > 0].double().sort(descending=True).values.log()
    if len(ordered) < 3:
        return math.nan
    rank = torch.arange(1, len(ordered) + 1, device=ordered.device, dtype=torch.float64).log()
    rank -= rank.mean()
    return -float((rank * (ordered - ordered.mean())).sum() / rank.square().sum())


def share_of_top(scores: Tensor, part: float) -> float:
    """What the given part of the tokens, those with the largest scores, has of the sum of all scores [n]."""
    count = max(round(part * len(scores)), 1)
    return float(scores.topk(count).values.sum() / scores.sum())


_EVERY_NATIVE = 256
"""Tokens between two samples where native code computes the attention, and a sample costs an attention of its own."""


class SparsityMeter:
    """Samples the attention of a layer: the last query of a prefill chunk, and of every 16th decode step.

    Native code does not show its probabilities: there the last query of a forward is sampled every 256 tokens, over
    what is held after it. Steps that run natively as a whole are not sampled.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._samples = 0

    def __call__(self, probs: Tensor, visible: Tensor, step: int) -> None:
        """Look at one forward.

        Args:
            probs: [B, Hkv, G, Q, K] float32.
            visible: [B, Hkv, K] bool, places that hold a token.
            step: tokens seen, which says whether it is time for a sample.
        """
        if probs.shape[3] > 1 or step % _EVERY == 0:
            self.add(probs, visible)

    def add(self, probs: Tensor, visible: Tensor) -> None:
        """Take a sample of what the last query looks at; arguments as above."""
        sample = sparsity(probs[..., -1, :], visible.unsqueeze(2)).mean()
        self._sum = sample if self._sum is None else self._sum + sample
        self._samples += 1

    def wants(self, before: int, after: int) -> bool:
        """Whether to sample a forward that native code took from `before` to `after` tokens."""
        return self._sum is None or before // _EVERY_NATIVE < after // _EVERY_NATIVE

    @property
    def value(self) -> float:
        """The mean of all samples; NaN before the first."""
        return math.nan if self._sum is None else float(self._sum) / self._samples


@dataclass(frozen=True)
class LayerStatistics:
    """What a layer's attention looks like.

    Attributes:
        layer: its number.
        sparsity: part of the held tokens that a query all but ignores (below 1% of its largest attention), a mean over
            sampled queries and heads.
        scores: [n] float32, accumulated scores of the held tokens, a mean over rows and heads, largest first; empty
            for a policy that keeps none.
        exponent: of the power law of those scores; NaN without them.
        mass: part of all attention paid so far, weighted as scores are, that went to tokens still held; NaN without
            scores.
    """

    layer: int
    sparsity: float
    scores: Tensor
    exponent: float
    mass: float
