"""What a token is worth and which tokens stay: pure functions of tensors, plus the two scorers built on them.

Owns the eviction rule. Knows neither layers, nor models, nor where keys and values lie.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from h2o_stream.config import CachePlan


class Scorer(ABC):
    """Keeps one float32 score per slot up to date and ranks the slots by what they are worth."""

    observes: bool
    """Whether `observe` wants the attention probabilities of every forward."""

    @abstractmethod
    def observe(self, scores: Tensor, probs: Tensor) -> Tensor:
        """Scores after the attention of Q new tokens.

        Args:
            scores: [B, Hkv, K] float32, zero for the new tokens.
            probs: [B, Hkv, G, Q, K] float32, the softmax of those tokens over all visible keys.

        Returns:
            [B, Hkv, K] float32, a new tensor.
        """

    @abstractmethod
    def priority(self, scores: Tensor, rank: Tensor) -> Tensor:
        """What an unprotected slot is worth: [B, Hkv, K] float32, the lowest is evicted first."""


class Accumulated(Scorer):
    """Attention received, summed over the query heads of the group and over time (H2O, arXiv 2306.14048).

    With a decay below 1 every later token shrinks what was summed before, so that old tokens cannot live
    on attention they got long ago. Deliberate difference to the published code: the whole group of
    query heads counts, not its first head.
    """

    observes = True

    def __init__(self, decay: float) -> None:
        self.decay = decay

    def observe(self, scores: Tensor, probs: Tensor) -> Tensor:
        """Decay what was there, add what the new queries give; see `Scorer.observe`."""
        *_, groups, new, _ = probs.shape
        if new == 1:
            return scores.mul(self.decay).add_(probs.sum((2, 3)))
        age = torch.arange(new - 1, -1, -1, device=probs.device, dtype=torch.float32)
        weights = (self.decay**age).repeat(groups)
        received = weights @ probs.flatten(2, 3)
        return received.add_(scores, alpha=self.decay**new)

    def priority(self, scores: Tensor, rank: Tensor) -> Tensor:
        """The score itself."""
        return scores


class Recency(Scorer):
    """The oldest unprotected token leaves first: sliding windows and StreamingLLM."""

    observes = False

    def observe(self, scores: Tensor, probs: Tensor) -> Tensor:
        """Nothing to keep up to date."""
        return scores

    def priority(self, scores: Tensor, rank: Tensor) -> Tensor:
        """Newer is worth more."""
        return rank.neg().float()


def make_scorer(plan: CachePlan) -> Scorer:
    """The scorer of a plan: without slots for heavy hitters nothing has to be scored."""
    return Accumulated(plan.decay) if plan.heavy else Recency()


def protected(index: Tensor, rank: Tensor, pinned: int, recent: int) -> Tensor:
    """Which slots may not be evicted; what it says of empty slots is of no account.

    Args:
        index: [B, Hkv, K] int64, token index of each slot.
        rank: [B, Hkv, K] int64, kept keys newer than the slot's.
        pinned: leading tokens of the stream that stay (sinks, system prompt).
        recent: newest tokens that stay.

    Returns:
        [B, Hkv, K] bool.
    """
    return (index < pinned) | (rank < recent)


def select(priority: Tensor, index: Tensor, safe: Tensor, count: int) -> Tensor:
    """Choose the slots to keep: the protected ones and, after them, those of the highest priority.

    For the budgets of ``h2o-paper`` this is the cookbook's `HHCache` rule: the top-H scores among all but
    the last R tokens, plus the last R, in token order.

    Args:
        priority: [B, Hkv, K] float32.
        index: [B, Hkv, K] int64, -1 where the slot is empty.
        safe: [B, Hkv, K] bool, see `protected`.
        count: how many to keep, at most the slots that are not empty.

    Returns:
        [B, Hkv, count] int64 places along K, oldest token first.
    """
    worth = priority.masked_fill(safe, torch.inf).masked_fill(index < 0, -torch.inf)
    places = worth.topk(count, dim=-1).indices
    order = index.gather(-1, places).argsort(-1)
    return places.gather(-1, order)
