"""Causal attention of new tokens over the places of a layer: rotate, multiply, hide, softmax.

Pure functions of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from h2o_stream.cache.policies import Attention, Budget, Held
from h2o_stream.cache.rope import distances, rotate_back
from h2o_stream.config import Positions


@dataclass(frozen=True)
class Arrivals:
    """Q new columns, packed to the left.

    Attributes:
        counts: how many of them each row has; the rest is padding.
        new: Q.
        device: where they are.
    """

    counts: tuple[int, ...]
    new: int
    device: torch.device

    @property
    def ragged(self) -> bool:
        """Whether there is padding."""
        return min(self.counts) < self.new

    @cached_property
    def count(self) -> Tensor:
        """[B, 1, 1] int64, `counts`."""
        return torch.tensor(self.counts, device=self.device).view(-1, 1, 1)

    @cached_property
    def place(self) -> Tensor:
        """[Q] int64, 0 for the first column."""
        return torch.arange(self.new, device=self.device)

    @cached_property
    def there(self) -> Tensor:
        """[B, 1, Q] bool, False for padding."""
        return self.place < self.count

    @cached_property
    def later(self) -> Tensor:
        """[B, 1, Q] int64, tokens of the row that come after each; 0 for padding."""
        return (self.count - 1 - self.place).clamp_min(0)

    def attention(self, probs: Tensor) -> Attention:
        """The probabilities [B, Hkv, G, Q, K] as policies want them."""
        if self.ragged:
            return Attention(probs * self.there[:, :, None, :, None], self.later.unsqueeze(1).float(), self.count)
        return Attention(probs, self.later[0, 0].float(), self.new)


class Products(NamedTuple):
    """What a model does with the products of queries and keys.

    Attributes:
        scaling: a factor.
        softcap: their bound, by tanh; None for no bound.
    """

    scaling: float
    softcap: float | None = None


class Multiplication:
    """How attention multiplies: with products of matrices."""

    def alike(self, query: Tensor, keys: Tensor, turns: Tensor | None) -> Tensor:
        """Every query times every key.

        Args:
            query: [B, Hkv, N, D], rotated.
            keys: [B, Hkv, K, D].
            turns: [B, Hkv, K, Drot], what the keys are rotated back by; None where they are rotated already.

        Returns:
            [B, Hkv, N, K] float32.
        """
        keys = keys if turns is None else rotate_back(keys, turns)
        return torch.matmul(query, keys.transpose(2, 3)).float()

    def mixed(self, probs: Tensor, values: Tensor) -> Tensor:
        """The values [B, Hkv, K, D] by the probabilities [B, Hkv, N, K]: [B, Hkv, N, D]."""
        return torch.matmul(probs.to(values.dtype), values)


def weigh(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    turns: Tensor | None,
    arrivals: Arrivals,
    hidden: Tensor | None,
    products: Products,
    multiplication: Multiplication,
) -> tuple[Tensor, Tensor]:
    """Attention of Q queries over K places.

    Args:
        query: [B, Hq, Q, D], rotated.
        keys: [B, Hkv, K, D].
        values: [B, Hkv, K, D].
        turns: [B, Hkv, K, Drot], see `Multiplication.alike`.
        arrivals: the queries.
        hidden: [B, Hkv, Q, K] bool, what may not be seen; None for nothing.
        products: what becomes of query times key.
        multiplication: how it is done.

    Returns:
        Output [B, Q, Hq, D] and float32 probabilities [B, Hkv, G, Q, K].
    """
    batch, query_heads, new, size = query.shape
    kv_heads, places = keys.shape[1:3]
    grouped = query.reshape(batch, kv_heads, -1, size)
    logits = multiplication.alike(grouped, keys, turns) * products.scaling
    if products.softcap is not None:
        logits = logits.div_(products.softcap).tanh_().mul_(products.softcap)
    logits = logits.view(batch, kv_heads, query_heads // kv_heads, new, places)
    if hidden is not None:
        logits = logits.masked_fill_(hidden[:, :, None], -torch.inf)
    probs = logits.softmax(-1)
    output = multiplication.mixed(probs.flatten(2, 3), values)
    return output.view(batch, query_heads, new, values.shape[-1]).transpose(1, 2), probs


def hide(held: Held, arrivals: Arrivals, sliding: int | None) -> Tensor:
    """Which places a new token may not see: empty ones, newer ones, and those of age `sliding` and more.

    Returns:
        [B, Hkv, Q, K] bool. Padding may see all, so that no softmax is empty.
    """
    index = held.index[:, :, None, :]
    asked_at = (held.seen - arrivals.count + arrivals.place)[..., None]
    hidden = (index < 0) | (index > asked_at)
    if sliding is not None:
        hidden |= index <= asked_at - sliding
    return hidden & arrivals.there[..., None] if arrivals.ragged else hidden


def rotate(
    query: Tensor,
    held: Held,
    arrivals: Arrivals,
    positions: Positions,
    span: int | Tensor,
    budget: Budget,
    turns: Tensor,
) -> tuple[Tensor, Tensor]:
    """Place the newest token of each row at distance 0 and every other behind it.

    Args:
        query: [B, Hq, Q, D], un-rotated.
        held: the K places.
        arrivals: the Q new tokens.
        positions: ``gap`` or ``rolling``.
        span: with ``gap``, the distance up to which distances are true.
        budget: its pins have no gap in front of them, so that what must be known stays near.
        turns: [N, Drot], cosines and sines by distance; N is more than the largest.

    Returns:
        The query, rotated; what the keys are rotated back by, [B, Hkv, K, Drot].
    """
    if positions == "gap" and budget.pins:
        span = torch.where(budget.pinned(held.index), 0, span)
    behind = distances(positions, span, held.seen - 1 - held.index, held.rank).clamp_(0, turns.shape[0] - 1)
    if arrivals.new > 1:
        query = rotate_back(query, embedding(arrivals.later, turns))
    return query, embedding(behind, turns)
