"""Causal attention of new tokens over the places of a layer: rotate, multiply, causal_mask, softmax.

Pure functions of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from h2o_stream.cache.policies import Attention, Budget, Candidates
from h2o_stream.cache.rope import distances, rotate_back
from h2o_stream.config import Positions


@dataclass(frozen=True)
class QueryChunk:
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


class LogitTransform(NamedTuple):
    """What a model does with the transform of queries and keys.

    Attributes:
        scaling: a factor.
        softcap: their bound, by tanh; None for no bound.
    """

    scaling: float
    softcap: float | None = None


class RopeLookup(NamedTuple):
    """What keys are rotated back by.

    Attributes:
        table: [N, Drot], cosines and sines by distance.
        behind: [B, Hkv, K] int64, the distance of each place from the newest token.
    """

    table: Tensor
    behind: Tensor


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lookup: RopeLookup | None,
    chunk: QueryChunk,
    hidden: Tensor | None,
    transform: LogitTransform,
) -> tuple[Tensor, Tensor]:
    """Attention of Q queries over K places.

    Args:
        query: [B, Hq, Q, D], rotated.
        keys: [B, Hkv, K, D].
        values: [B, Hkv, K, D].
        lookup: of the keys; None where they are rotated already.
        chunk: the queries.
        hidden: [B, Hkv, Q, K] bool, what may not be seen; None for nothing.
        transform: what becomes of query times key.

    Returns:
        Output [B, Q, Hq, D], contiguous, and float32 probabilities [B, Hkv, G, Q, K].
    """
    batch, query_heads, new, size = query.shape
    kv_heads, places = keys.shape[1:3]
    if lookup is not None:
        keys = rotate_back(keys, embedding(lookup.behind, lookup.table))
    grouped = query.reshape(batch, kv_heads, -1, size)
    logits = torch.matmul(grouped, keys.transpose(2, 3)).float() * transform.scaling
    if transform.softcap is not None:
        logits = logits.div_(transform.softcap).tanh_().mul_(transform.softcap)
    logits = logits.view(batch, kv_heads, query_heads // kv_heads, new, places)
    if hidden is not None:
        logits = logits.masked_fill_(hidden[:, :, None], -torch.inf)
    probs = logits.softmax(-1)
    output = torch.matmul(probs.flatten(2, 3).to(values.dtype), values)
    return output.view(batch, query_heads, new, values.shape[-1]).transpose(1, 2).contiguous(), probs


def causal_mask(held: Candidates, chunk: QueryChunk, sliding: int | None) -> Tensor:
    """Which places a new token may not see: empty ones, newer ones, and those of age `sliding` and more.

    Returns:
        [B, Hkv, Q, K] bool. Padding may see all, so that no softmax is empty.
    """
    index = held.index[:, :, None, :]
    asked_at = (held.seen - chunk.count + chunk.place)[..., None]
    hidden = (index < 0) | (index > asked_at)
    if sliding is not None:
        hidden |= index <= asked_at - sliding
    return hidden & chunk.there[..., None] if chunk.ragged else hidden


def rotate(
    query: Tensor,
    held: Candidates,
    chunk: QueryChunk,
    positions: Positions,
    span: int | Tensor,
    budget: Budget,
    table: Tensor,
) -> tuple[Tensor, RopeLookup]:
    """Place the newest token of each row at distance 0 and every other behind it.

    Args:
        query: [B, Hq, Q, D], un-rotated.
        held: the K places.
        chunk: the Q new tokens.
        positions: ``gap`` or ``rolling``.
        span: with ``gap``, the distance up to which distances are true.
        budget: its pins have no gap in front of them, so that what must be known stays near.
        table: [N, Drot], cosines and sines by distance; N is more than the largest.

    Returns:
        The query, rotated; how to rotate the keys.
    """
    if positions == "gap" and budget.pins:
        span = torch.where(budget.pinned(held.index), 0, span)
    behind = distances(positions, span, held.seen - 1 - held.index, held.rank).clamp_(0, table.shape[0] - 1)
    if chunk.new > 1:
        query = rotate_back(query, embedding(chunk.later, table))
    return query, RopeLookup(table, behind)
