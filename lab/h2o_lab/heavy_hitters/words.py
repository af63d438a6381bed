"""How the attention a token receives goes with its words: their frequency, and how many others they occur with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NEAR = 5
"""Tokens on each side of a word that it occurs with."""

PARTS = 10
"""Groups of equally many words, by the number of words that they occur with."""


@dataclass(frozen=True)
class WordAttention:
    """How attention goes with the words of a text, by rank correlation (Spearman's).

    Attributes:
        frequency: attention received by all occurrences of a word, with their number.
        cooccurrence: the same, with the number of different words near it.
        per_token: attention received by an occurrence in the mean, as a multiple of what it would receive if queries
            attended to everything alike, with the number of different words near it.
        by_cooccurrence: mean multiple in each of `PARTS` groups of words, from few neighbors to many.
    """

    frequency: float
    cooccurrence: float
    per_token: float
    by_cooccurrence: list[float]


def word_attention(tokens: Sequence[int], received: Tensor) -> WordAttention:
    """The correlations of a text, whose words are its tokens, with the attention [N] that each received.

    The first token, which receives attention as a sink, is left out.
    """
    received = received.double().cpu()
    uniform = (1.0 / torch.arange(1, len(tokens) + 1, dtype=torch.float64)).flip(0).cumsum(0).flip(0)
    words = list(dict.fromkeys(tokens[1:]))
    place = {word: number for number, word in enumerate(words)}
    of_token = torch.tensor([place[token] for token in tokens[1:]])
    count = torch.zeros(len(words), dtype=torch.float64).index_add_(0, of_token, torch.ones(len(of_token)).double())
    total = torch.zeros_like(count).index_add_(0, of_token, received[1:])
    lift = torch.zeros_like(count).index_add_(0, of_token, received[1:] / uniform[1:]) / count
    near = cooccurrence(tokens[1:], words)
    ordered = lift[near.argsort(stable=True)]
    groups = [float(part.mean()) for part in ordered.tensor_split(min(PARTS, len(ordered)))]
    return WordAttention(
        rank_correlation(total, count), rank_correlation(total, near), rank_correlation(lift, near), groups
    )


def cooccurrence(tokens: Sequence[int], words: Sequence[int]) -> Tensor:
    """[len(words)] float64: the number of different other words within `NEAR` tokens of each word."""
    near: dict[int, set[int]] = {word: set() for word in words}
    for place, token in enumerate(tokens):
        near[token].update(tokens[max(place - NEAR, 0) : place + NEAR + 1])
    return torch.tensor([len(near[word] - {word}) for word in words], dtype=torch.float64)


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's rank correlation of two tensors [n]; equal values share a rank. NaN if one is constant."""
    a, b = (_ranks(values) for values in (x, y))
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / (a.square().sum() * b.square().sum()).sqrt())


def _ranks(values: Tensor) -> Tensor:
    _, group, count = values.unique(return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    ranks: Tensor = (last - (count - 1) / 2)[group]
    return ranks
