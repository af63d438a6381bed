"""The interface of a policy (score update, protected set, choice) and the eviction rule they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_stream.config import POLICIES, CachePlan
from h2o_stream.registry import resolve


@dataclass(frozen=True)
class Attention:
    """What Q new tokens paid attention to.

    Attributes:
        probs: [B, Hkv, G, Q, K] float32, their softmax over all visible keys; zero for a query that is padding.
        later: [Q], or [B, 1, 1, Q] when rows differ, float32: new tokens after each query.
        new: how many tokens are new, or [B, 1, 1] int64 when rows differ.
    """

    probs: Tensor
    later: Tensor
    new: int | Tensor


def faded(decay: float, later: Tensor) -> Tensor:
    """``decay ** later``, what a query counts after so many more."""
    return decay**later


@dataclass(frozen=True)
class Held:
    """The K places of every head, as a policy sees them.

    Attributes:
        scores: [B, Hkv, K] float32.
        index: [B, Hkv, K] integer, the token's index in its row; -1 where the place is empty.
        rank: [B, Hkv, K] integer, held tokens newer than it.
        seen: [B, 1, 1] int64, tokens seen by each row.
        lasting: [B, Hkv, K] float32, the long-term scores of a policy that has them.
    """

    scores: Tensor
    index: Tensor
    rank: Tensor
    seen: Tensor
    lasting: Tensor | None = None


@dataclass(frozen=True)
class Budget:
    """What eviction may not touch.

    Attributes:
        sinks: first tokens.
        pins: ranges of token indices.
        recent: newest tokens.
    """

    sinks: int
    pins: tuple[range, ...]
    recent: int

    def pinned(self, index: Tensor) -> Tensor:
        """Which token indices are in the pins, bool of the same shape."""
        pinned = torch.zeros_like(index, dtype=torch.bool)
        for pin in self.pins:
            pinned |= (index >= pin.start) & (index < pin.stop)
        return pinned


class Policy(ABC):
    """One way to choose what stays; its state is a float32 score or two per slot, kept by the caller.

    Args:
        plan: the budgets and the decay.
        layer: which decoder layer it serves.
    """

    observes: bool = True
    """Whether `observe` wants the attention of every forward."""

    long_term: bool = False
    """Whether there is a second, long-term score, kept by `remember`."""

    def __init__(self, plan: CachePlan, layer: int = 0) -> None:
        self.plan = plan
        self.layer = layer

    def observe(self, scores: Tensor, attention: Attention) -> Tensor:
        """Scores after the attention of the new tokens.

        Args:
            scores: [B, Hkv, K] float32, zero for the new tokens, -inf where a place is empty.
            attention: what the new tokens looked at.

        Returns:
            [B, Hkv, K] float32, a new tensor.
        """
        return scores

    def remember(self, lasting: Tensor, held: Held, attention: Attention) -> Tensor:
        """Long-term scores after the attention of the new tokens.

        Args:
            lasting: [B, Hkv, K] float32, zero for the new tokens and where a place is empty.
            held: the places; `seen` counts the new tokens.
            attention: what the new tokens looked at.

        Returns:
            [B, Hkv, K] float32, a new tensor.
        """
        return lasting

    def protected(self, held: Held, budget: Budget) -> Tensor:
        """Which places may not be evicted, [B, Hkv, K] bool; what it says of empty places is of no account."""
        return (held.rank < budget.recent) | (held.index < budget.sinks) | budget.pinned(held.index)

    def total(self, seen: Tensor) -> Tensor | None:
        """What all scores would sum to for each query head, had nothing been evicted; None without scores.

        Args:
            seen: [B, 1, 1] int64, tokens of each row.
        """
        return None

    @abstractmethod
    def priority(self, held: Held) -> Tensor:
        """What an unprotected place is worth: [B, Hkv, K] float32, the lowest is evicted first."""

    def worth(self, held: Held, budget: Budget) -> Tensor:
        """The priority with protected places at +inf and empty ones at -inf, [B, Hkv, K] float32.

        A priority of NaN, which a model gives whose numbers overflow, counts as the lowest of all.
        """
        least = torch.finfo(torch.float32).min
        worth = self.priority(held)
        worth = worth.masked_fill(worth.isnan(), least).masked_fill_(self.protected(held, budget), torch.inf)
        return worth.masked_fill_(held.index < 0, -torch.inf)


def select(worth: Tensor, index: Tensor, most: int, limits: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose the places to keep, those worth most.

    For the budgets of ``h2o-paper`` this is the cookbook's `HHCache` rule: the top-H scores among all but
    the last R tokens, plus the last R, in token order.

    Args:
        worth: [B, Hkv, K] float32, see `Policy.worth`.
        index: [B, Hkv, K] integer token index, -1 where the place is empty.
        most: n, how many the row keeps that keeps most.
        limits: [B] int64, how many each row keeps, at most; None if all keep `most`.

    Returns:
        [B, Hkv, n] int64 places along K, oldest token first, and the token index of each; a row that keeps fewer has
        -1 in front.
    """
    places = worth.topk(most, dim=-1).indices
    index = index.gather(-1, places)
    if limits is not None:
        index = index.masked_fill(torch.arange(most, device=index.device) >= limits.view(-1, 1, 1), -1)
    index, order = index.sort(-1)
    return places.gather(-1, order), index


def make_policy(plan: CachePlan, layer: int = 0) -> Policy:
    """The policy of a plan. Without slots to choose for, recency is all there is, whatever its name."""
    policy: Policy = resolve(POLICIES[plan.policy if plan.heavy else "recent"].rule)(plan, layer)
    return policy


def merged(pins: Sequence[range]) -> tuple[range, ...]:
    """Ranges without overlaps and empty ones, in order."""
    result: list[range] = []
    for pin in sorted((pin for pin in pins if len(pin)), key=lambda pin: pin.start):
        if result and pin.start <= result[-1].stop:
            result[-1] = range(result[-1].start, max(result[-1].stop, pin.stop))
        else:
            result.append(range(pin.start, pin.stop))
    return tuple(result)
