"""The attention of a described model to the slots of one cache, layer by layer, from and to rows of its products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from h2o_stream.cache.attention import LogitTransform
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.gpu.groups import limits_of
from h2o_stream.gpu.journal import Journal
from h2o_stream.gpu.kernels import GpuKernels, NewTokens, Norms
from h2o_stream.gpu.layers import in_order
from h2o_stream.native.attention import Attention
from h2o_stream.native.description import Description


class StreamAttention:
    """Attends and evicts; counts no tokens.

    Args:
        description: of a model that `layers.why_not` has no objection to.
        cache: its slots are written.

    Attributes:
        layers: the attention of each layer, as it is described.
    """

    def __init__(self, description: Description, cache: H2OCache, kernels: GpuKernels) -> None:
        self._cache, self._kernels = cache, kernels
        device = description.embedding.weights.device
        self.layers = [layer.attention for layer in description.layers if layer.attention]
        ordered = [in_order(attention) for attention in self.layers]
        self._attentions = [attention for attention, _ in ordered]
        self._orders = [None if order is None else order.to(device) for _, order in ordered]
        self._sinks = [None if x.sink_logits is None else x.sink_logits.to(device) for x in self.layers]

    def steps(
        self, number: int, projected: Tensor, out: Tensor | None = None, rows: int = 1, journal: Journal | None = None
    ) -> Tensor:
        """One token after another of each row.

        Args:
            number: number of the layer.
            projected: [B Q, n] queries, keys and values.
            out: [B Q, Hq Dv], is written; None: a new one.
            rows: B.
            journal: notes the slots before all but the first token.

        Returns:
            `out`.
        """
        attention, (heads, out) = self._attentions[number], self._heads(number, projected, out, rows)
        query, key = attention.query_norm, attention.key_norm
        factor = attention.rope.scale if attention.rope else 1.0
        norms = Norms(query.weight, key.weight, query.epsilon, key.epsilon, factor)
        transform, lengths = self._transform(number, attention), self._cache.tokens.lengths
        for group in self._cache.layers[number].head_groups:
            for token in range(heads.out.shape[2]):
                if token and journal:
                    journal.note(group, token)
                self._kernels.step(group, heads.one(token, group.heads), transform, lengths, norms)
        return out

    def prompt(
        self, number: int, projected: Tensor, out: Tensor | None = None, rows: int = 1, offset: int = 0,
        lanes: int = 1, lane: int = 0, before: Any = None,
    ) -> Tensor:  # fmt: skip
        """Tokens that come `offset` after the counted ones, chunk after chunk; waits for an event `before`. The rest as
        in `steps` and `GpuKernels.prompt`.
        """
        attention, (heads, out) = self._attentions[number], self._heads(number, projected, out, rows)
        new = heads.out.shape[2]
        for x, norm in ((heads.query, attention.query_norm), (heads.key, attention.key_norm)):
            if norm.weight is not None:
                x.copy_(functional.rms_norm(x.float(), x.shape[-1:], norm.weight, norm.epsilon))
        starts = [(length + offset, new) for length in self._cache.tokens.lengths or (0,) * rows]
        if before:
            torch.cuda.current_stream().wait_event(before)
        for group in self._cache.layers[number].head_groups:
            of_group, transform = heads._replace(heads=group.heads), self._transform(number, attention)
            factor, limits = attention.rope.scale if attention.rope else 1.0, limits_of(group, starts, new)
            self._kernels.prompt(group, of_group, transform, None, limits, offset, factor, lanes, lane)
        return out

    def _heads(self, number: int, projected: Tensor, out: Tensor | None, rows: int) -> tuple[NewTokens, Tensor]:
        """The heads of B Q tokens as views of what was projected, and [B Q, Hq Dv] for their outputs."""
        attention, order = self._attentions[number], self._orders[number]
        if out is None:
            out = projected.new_empty(len(projected), attention.out.columns)
        projected = projected if order is None else projected.index_select(1, order)
        (tokens, total), first, at = projected.shape, projected.storage_offset(), attention.heads
        new = tokens // rows

        def heads(count: int, size: int, offset: int, stride: int) -> Tensor:
            return projected.as_strided((rows, count, new, size), (new * total, stride, total, 1), first + offset)

        query = heads(attention.query_heads, attention.head_size, at.query_offset, at.query_stride)
        key = heads(attention.kv_heads, attention.head_size, at.key_offset, at.key_stride)
        value = heads(attention.kv_heads, attention.value_size, at.value_offset, at.value_stride)
        return NewTokens(query, key, value, out.view(rows, new, attention.query_heads, -1).transpose(1, 2)), out

    def _transform(self, number: int, attention: Attention) -> LogitTransform:
        return LogitTransform(attention.scaling, attention.softcap or None, self._sinks[number])
