"""The interface of a policy (score update, protected tokens, priority) and the eviction rule all policies share.

A policy says what a token is worth and owns no state: scores are kept for it, one or two per slot, and what it says it
needs of each head (`cache.head_group`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from h2o_stream.base.registry import resolve
from h2o_stream.cache.protection import Protection
from h2o_stream.cache.rope import RopeLookup
from h2o_stream.config import POLICIES, CachePlan
from h2o_stream.errors import ConfigError


@dataclass(frozen=True)
class Attention:
    """The attention of Q new tokens.

    Attributes:
        probs: [B, Hkv, G, Q, K] float32, their softmax over all visible keys; zero for a query that is padding.
        later: [Q], or [B, 1, 1, Q] when rows differ, float32: number of new tokens after each query.
        new: number of new tokens, or [B, 1, 1] int64 when rows differ.
    """

    probs: Tensor
    later: Tensor
    new: int | Tensor


@dataclass(frozen=True)
class NewQueries:
    """The queries of Q new tokens.

    Attributes:
        queries: [B, Hkv, G, Q, D] float32, un-rotated like the keys (rotated by token index with ``absolute``) and
            scaled, so that their products with keys are the model's; zero where there is padding.
        before: [B, 1, 1] int64, number of earlier tokens in each row.
        count: [B, 1, 1] int64, number of new tokens in each row, which come first.
    """

    queries: Tensor
    before: Tensor
    count: Tensor


@dataclass(frozen=True)
class Candidates:
    """The K tokens of every head among which a policy chooses: cached ones, and in a prefill the new ones.

    Attributes:
        scores: [B, Hkv, K] float32.
        index: [B, Hkv, K] integer, the token's index in its row; -1 where a slot is empty.
        rank: [B, Hkv, K] integer, number of newer tokens among them.
        seen: [B, 1, 1] int64, tokens seen by each row.
        long_term_scores: [B, Hkv, K] float32, the long-term scores of a policy that has them.
        keys: [B, Hkv, K, D], as stored: un-rotated, or rotated by token index with ``absolute``; undefined where a slot
            is empty. Only in `Policy.priority` of a policy that `needs_keys`, like the next two.
        values: [B, Hkv, K, D]; undefined where a slot is empty.
        rotations: cosines and sines in float32 for the keys' positions; None with ``absolute``.
        head_state: what the policy keeps of each head; see `Policy.head_state`.
    """

    scores: Tensor
    index: Tensor
    rank: Tensor
    seen: Tensor
    long_term_scores: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    rotations: RopeLookup | None = None
    head_state: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class Policy(ABC):
    """One way to choose which tokens stay.

    A subclass that is a dataclass, too, has parameters of its own: its fields, which follow its name: `POLICIES`.

    Args:
        plan: window, protected tokens, decay and seed.
        layer: index of the decoder layer, which random policies draw by.
    """

    plan: CachePlan
    layer: int = 0

    needs_attention: ClassVar[bool] = True
    """Whether scores depend on attention, so that `update_scores` must see every forward."""

    long_term: bool = field(default=False, init=False)
    """Whether there is a second, long-term score; see `update_long_term`."""

    needs_keys: ClassVar[bool] = False
    """Whether `priority` looks at keys and values."""

    def __post_init__(self) -> None:  # noqa: B027 -- most derive nothing
        """Derive what follows from the plan and the parameters."""

    @property
    def rule(self) -> str:
        """``module:class``, as in `PolicyDefaults`."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    def update_scores(self, scores: Tensor, attention: Attention) -> Tensor:
        """Scores after the attention of the new tokens.

        Args:
            scores: [B, Hkv, K] float32, zero for the new tokens, -inf where a slot is empty.
            attention: what the new tokens paid attention to.

        Returns:
            [B, Hkv, K] float32, a new tensor.
        """
        return scores

    def update_long_term(self, long_term_scores: Tensor, candidates: Candidates, attention: Attention) -> Tensor:
        """Long-term scores after the attention of the new tokens.

        Args:
            long_term_scores: [B, Hkv, K] float32, zero for the new tokens and where a slot is empty.
            candidates: the K tokens; `seen` counts the new ones.
            attention: what the new tokens paid attention to.

        Returns:
            [B, Hkv, K] float32, a new tensor.
        """
        return long_term_scores

    def head_state(self, queries_per_key: int, key_size: int, value_size: int) -> dict[str, Tensor]:
        """What the policy keeps of each KV head beside the scores: its value before the first token, by name.

        The cache keeps a copy [B, Hkv, *] of each tensor, which is part of its size and its state. Names must differ
        from those of the slots' tensors (`HeadGroup`, `Store`).

        Args:
            queries_per_key: G, query heads of each KV head.
            key_size: D of queries and keys.
            value_size: D of values.
        """
        return {}

    def update_head_state(self, head_state: Mapping[str, Tensor], new: NewQueries) -> dict[str, Tensor]:
        """The state of the heads after new tokens, before any token is evicted for them.

        Args:
            head_state: the tensors [B, Hkv, *] of `head_state`.
            new: the queries of the new tokens. A row may have none and keeps its state.

        Returns:
            All of them, as new tensors.
        """
        return dict(head_state)

    def protected(self, candidates: Candidates, protection: Protection) -> Tensor:
        """Which tokens must not be evicted, [B, Hkv, K] bool; undefined for empty slots."""
        return (
            (candidates.rank < protection.recent)
            | (candidates.index < protection.sinks)
            | protection.pinned(candidates.index)
        )

    def total(self, seen: Tensor) -> Tensor | None:
        """What all scores would sum to for each query head, had nothing been evicted; None without scores."""
        return None

    @abstractmethod
    def priority(self, candidates: Candidates) -> Tensor:
        """Worth of the unprotected tokens, [B, Hkv, K] float32; the lowest is evicted first."""

    def worth(self, candidates: Candidates, protection: Protection) -> Tensor:
        """The priority, +inf for protected tokens and -inf for empty slots, [B, Hkv, K] float32.

        NaN, which a model whose numbers overflow gives, counts as the lowest priority. Transient tokens are below every
        priority, the oldest lowest: all of them at most -2**127, where numbers are 2**104 apart.
        """
        lowest = torch.finfo(torch.float32).min
        worth = self.priority(candidates)
        worth = worth.masked_fill(worth.isnan(), lowest)
        if protection.transient:
            below = -(2.0**127) - 2.0**104 * candidates.rank.float()
            worth = torch.where(protection.is_transient(candidates.index), below, worth)
        worth = worth.masked_fill_(self.protected(candidates, protection), torch.inf)
        return worth.masked_fill_(candidates.index < 0, -torch.inf)


def select(worth: Tensor, index: Tensor, limit: int, limits: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose the tokens of most worth.

    For the windows of ``h2o-paper`` this is the cookbook's `HHCache` rule: the top-H scores among all but the last R
    tokens, plus the last R, in token order.

    Args:
        worth: [B, Hkv, K] float32, see `Policy.worth`.
        index: [B, Hkv, K] integer token index, -1 where a slot is empty.
        limit: n, number of tokens kept by the row that keeps most.
        limits: [B] int64, number of tokens that each row keeps; None if all keep `limit`.

    Returns:
        [B, Hkv, n] int64 positions along K, oldest token first, and the token index of each; a row that keeps fewer
        has -1 in front.
    """
    chosen = worth.topk(limit, dim=-1).indices
    index = index.gather(-1, chosen)
    if limits is not None:
        index = index.masked_fill(torch.arange(limit, device=index.device) >= limits.view(-1, 1, 1), -1)
    index, order = index.sort(-1)
    return chosen.gather(-1, order), index


def make_policy(plan: CachePlan, layer: int = 0) -> Policy:
    """The policy of a plan, with the parameters after a colon in its name; raises ConfigError if it has no such."""
    kind = resolve(plan.rule)
    arguments = plan.policy.partition(":")[2] if plan.rule == POLICIES[plan.policy].rule else ""
    policy: Policy = kind(plan, layer, **_parameters(kind, plan.policy, arguments))
    return policy


def _parameters(kind: type[Policy], policy: str, text: str) -> dict[str, Any]:
    settable = [parameter for parameter in fields(kind) if parameter.init and parameter.name not in ("plan", "layer")]
    defaults: dict[str, Any] = {parameter.name: parameter.default for parameter in settable}
    values = dict[str, Any]()
    for word in filter(None, text.split(":")):
        name, _, value = word.partition("=")
        try:
            values[name] = type(defaults[name])(value)
        except (KeyError, ValueError):
            choices = ", ".join(f"{name}={default}" for name, default in defaults.items()) or "none"
            raise ConfigError(f"policy {policy!r}: {word!r} is no parameter; it has {choices}") from None
    return values
