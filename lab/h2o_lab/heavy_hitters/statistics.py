"""What H2O observed about attention (arXiv 2306.14048, section 3), measured while a cache is used.

with attach(model, config) as cache, measuring_sparsity(cache):
model.generate(**inputs)
print(statistics(cache))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from h2o_stream.cache.head_group import HeadGroup

NEGLIGIBLE = 0.01
"""Attention below this fraction of the query's largest counts as none: the paper's threshold for sparsity."""


def sparsity(probs: Tensor, visible: Tensor) -> Tensor:
    """Fraction of the visible tokens that each query all but ignores.

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


def share_of_top(scores: Tensor, fraction: float) -> float:
    """Share of the sum of all scores [n] that the largest ones have; `fraction` of the tokens count as largest."""
    count = max(round(fraction * len(scores)), 1)
    return float(scores.topk(count).values.sum() / scores.sum())


class SparsityMeter:
    """The mean sparsity of the last query of every forward; a `HeadGroup.watch`."""

    def __init__(self) -> None:
        self._sum: Tensor | float = math.nan
        self._samples = 0

    def __call__(self, probs: Tensor, visible: Tensor) -> None:
        """Add a chunk: probs [B, Hkv, G, Q, K] float32, visible [B, Hkv, K] bool, False for empty slots."""
        sample = sparsity(probs[..., -1, :], visible.unsqueeze(2)).mean()
        self._sum = sample + (self._sum if self._samples else 0.0)
        self._samples += 1

    @property
    def value(self) -> float:
        """The mean; NaN without a forward."""
        return float(self._sum) / max(self._samples, 1)


@dataclass(frozen=True)
class LayerStatistics:
    """What a layer's attention looks like.

    Attributes:
        layer: its index.
        sparsity: fraction of the held tokens that a query all but ignores (below 1% of its largest attention), a mean
            over forwards and heads; NaN outside of `measuring_sparsity`.
        scores: [n] float32, accumulated scores of the held tokens, a mean over rows and heads, largest first; empty
            for a policy that keeps none.
        exponent: exponent of the power law of those scores; NaN without them.
        mass: part of all attention paid so far, weighted as scores are, that went to tokens still held; NaN without
            scores.
    """

    layer: int
    sparsity: float
    scores: Tensor
    exponent: float
    mass: float


def statistics(cache: Any) -> list[LayerStatistics]:
    """Scores and kept attention of every layer that evicts, of the stream so far; see `measuring_sparsity`."""
    layers = getattr(cache, "evicting_layers", ())
    return [_layer_statistics(number, cache.layers[number].head_groups) for number in layers]


@contextmanager
def measuring_sparsity(cache: Any) -> Iterator[None]:
    """Inside the block `statistics` have the sparsity of attention, too, which is computed in torch meanwhile."""
    groups = getattr(cache, "evicting_groups", ())
    for group in groups:
        group.watch = SparsityMeter()
    try:
        yield
    finally:
        for group in groups:
            group.watch = None


def _layer_statistics(layer: int, groups: Sequence[HeadGroup]) -> LayerStatistics:
    """A mean over the heads of its groups."""
    measured = [_group_statistics(layer, group) for group in groups]
    if len(measured) == 1:
        return measured[0]
    total = sum(group.weight for group in groups)
    weights = [group.weight / total for group in groups]

    def mean(values: Sequence[float]) -> float:
        return math.fsum(weight * value for weight, value in zip(weights, values, strict=True))

    scores = torch.zeros(max(len(part.scores) for part in measured), dtype=torch.float32, device="cpu")
    for weight, part in zip(weights, measured, strict=True):
        scores[: len(part.scores)] += weight * part.scores.cpu()
    sparsity, mass = mean([part.sparsity for part in measured]), mean([part.mass for part in measured])
    return LayerStatistics(layer, sparsity, scores, power_law(scores), mass)


def _group_statistics(layer: int, group: HeadGroup) -> LayerStatistics:
    measured = group.watch.value if isinstance(group.watch, SparsityMeter) else math.nan
    total = group.policy.total(group.seen) if group.is_initialized and group.policy.needs_attention else None
    if total is None or not group.queries_per_key:
        return LayerStatistics(layer, measured, torch.empty(0, dtype=torch.float32, device="cpu"), math.nan, math.nan)
    scores = group.scores.masked_fill(group.index < 0, 0.0)
    mass = float((scores.double().sum(-1, keepdim=True) / (total * group.queries_per_key)).mean())
    ordered = scores.sort(-1, descending=True).values[..., : group.held].mean((0, 1))
    return LayerStatistics(layer, measured, ordered, power_law(ordered), mass)
