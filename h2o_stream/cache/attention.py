"""Causal attention of new tokens over the slots of a layer: rotate, multiply, mask, softmax.

Pure functions of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from h2o_stream.cache.policies import Attention, Candidates, NewQueries
from h2o_stream.cache.protection import Protection
from h2o_stream.cache.rope import RopeLookup, distances, rotate_back
from h2o_stream.config import Positions


class LogitTransform(NamedTuple):
    """What a model does with the products of queries and keys.

    Attributes:
        softcap: bound that tanh keeps them within; None for no bound.
        sinks: [Hq], a logit of each query head that stands for no token (learned sinks); None for none.
    """

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None

    def of_heads(self, heads: Tensor, kv_heads: int) -> LogitTransform:
        """The transform for the queries of some of the KV heads [n]."""
        if self.sinks is None:
            return self
        return self._replace(sinks=self.sinks.view(kv_heads, -1)[heads.to(self.sinks.device)].flatten())

    def logits(self, products: Tensor) -> Tensor:
        """Logits, float32, of products of queries and keys."""
        logits = products.float() * self.scaling
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


@dataclass(frozen=True)
class QueryChunk:
    """Q columns of new tokens for the KV heads of a head group, packed to the left.

    Attributes:
        query: [B, Hq, Q, D], un-rotated like the keys (already rotated with ``absolute``).
        key: [B, Hkv, Q, D].
        value: [B, Hkv, Q, D].
        transform: what the model does with query times key.
        lengths: number of earlier tokens in each row.
        counts: number of new tokens in each row; the columns after them are padding.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    transform: LogitTransform
    lengths: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def new(self) -> int:
        """Q."""
        return self.query.shape[2]

    @property
    def ragged(self) -> bool:
        """Whether there is padding."""
        return min(self.counts) < self.new

    @cached_property
    def count(self) -> Tensor:
        """[B, 1, 1] int64, `counts`. Equal ones are made on the device: a captured step must not copy from the host."""
        if min(self.counts) == max(self.counts):
            return torch.full((len(self.counts), 1, 1), self.counts[0], device=self.query.device)
        return torch.tensor(self.counts, device=self.query.device).view(-1, 1, 1)

    @cached_property
    def column(self) -> Tensor:
        """[Q] int64, 0 for the first column."""
        return torch.arange(self.new, device=self.query.device)

    @cached_property
    def is_token(self) -> Tensor:
        """[B, 1, Q] bool, False for padding."""
        return self.column < self.count

    @cached_property
    def later(self) -> Tensor:
        """[B, 1, Q] int64, number of tokens of the row after each one; 0 for padding."""
        return (self.count - 1 - self.column).clamp_min(0)

    def attention(self, probs: Tensor) -> Attention:
        """The probabilities [B, Hkv, G, Q, K] in the form that policies take."""
        if self.ragged:
            return Attention(probs * self.is_token[:, :, None, :, None], self.later.unsqueeze(1).float(), self.count)
        return Attention(probs, self.later[0, 0].float(), self.new)

    @property
    def new_queries(self) -> NewQueries:
        """The queries in the form that policies take."""
        queries = self.query.float().unflatten(1, (self.key.shape[1], -1)) * self.transform.scaling
        if self.ragged:
            queries = queries * self.is_token[:, :, None, :, None]
        return NewQueries(queries, torch.tensor(self.lengths, device=queries.device).view(-1, 1, 1), self.count)


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lookup: RopeLookup | None,
    mask: Tensor | None,
    transform: LogitTransform,
) -> tuple[Tensor, Tensor]:
    """Attention of Q queries over K keys.

    Args:
        query: [B, Hq, Q, D], rotated.
        keys: [B, Hkv, K, D].
        values: [B, Hkv, K, D].
        lookup: rotations of the keys; None if they are rotated already.
        mask: [B, Hkv, Q, K] bool, True where a query may not attend; None for nowhere.
        transform: what becomes of query times key.

    Returns:
        Output [B, Q, Hq, D], contiguous, and float32 probabilities [B, Hkv, G, Q, K],
        which do not sum to 1 if there is a learned sink.
    """
    batch, query_heads, new, size = query.shape
    kv_heads, num_keys = keys.shape[1:3]
    if lookup is not None:
        keys = rotate_back(keys, embedding(lookup.distance, lookup.table))
    grouped = query.reshape(batch, kv_heads, -1, size)
    logits = transform.logits(torch.matmul(grouped, keys.transpose(2, 3)))
    logits = logits.view(batch, kv_heads, query_heads // kv_heads, new, num_keys)
    if mask is not None:
        logits = logits.masked_fill_(mask[:, :, None], -torch.inf)
    if transform.sinks is not None:
        sinks = transform.sinks.float().view(kv_heads, -1, 1, 1)
        logits = torch.cat((logits, sinks.expand(*logits.shape[:-1], 1)), -1)
    probs = logits.softmax(-1)
    output = torch.matmul(probs[..., :num_keys].flatten(2, 3).to(values.dtype), values)
    probs = probs[..., :num_keys]
    return output.view(batch, query_heads, new, values.shape[-1]).transpose(1, 2).contiguous(), probs


def causal_mask(candidates: Candidates, chunk: QueryChunk, sliding: int | None, chunked: bool = False) -> Tensor:
    """Masks empty slots, newer tokens, and tokens of age `sliding` or more.

    If `chunked`, a token sees none before the last multiple of `sliding` instead, its own index included.

    Returns:
        [B, Hkv, Q, K] bool, True where a query may not attend. Padding attends to everything, so that no softmax is
        empty.
    """
    index = candidates.index[:, :, None, :]
    query_index = (candidates.seen - chunk.count + chunk.column)[..., None]
    mask = (index < 0) | (index > query_index)
    if sliding is not None:
        oldest = query_index // sliding * sliding if chunked else query_index - sliding + 1
        mask |= index < oldest
    return mask & chunk.is_token[..., None] if chunk.ragged else mask


def key_rotations(
    candidates: Candidates, positions: Positions, span: int | Tensor, protection: Protection, table: Tensor
) -> RopeLookup:
    """Place the newest token of each row at distance 0 and every other one behind it.

    Args:
        candidates: the K cached and new tokens.
        positions: ``gap`` or ``rolling``.
        span: with ``gap``, the distance up to which distances are true.
        protection: pinned tokens get a span of 0, so that what must be known stays near.
        table: [N, Drot], cosines and sines by distance; N is more than the largest distance.
    """
    if positions == "gap" and protection.pins:
        span = torch.where(protection.pinned(candidates.index), 0, span)
    age = candidates.seen - 1 - candidates.index
    distance = distances(positions, span, age, candidates.rank).clamp_(0, table.shape[0] - 1)
    return RopeLookup(table, distance)


def rotated_query(chunk: QueryChunk, table: Tensor) -> Tensor:
    """The queries [B, Hq, Q, D] of a chunk, rotated so that the newest token of each row is at distance 0.

    The table [N, Drot] has cosines and sines by distance; N is more than Q.
    """
    return rotate_back(chunk.query, embedding(chunk.later, table)) if chunk.new > 1 else chunk.query
