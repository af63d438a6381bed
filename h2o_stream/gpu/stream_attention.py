"""The attention of a described model to the slots of one cache, and its recurrent mixers, which update their states:
layer by layer, from and to rows of its products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from h2o_stream.cache.attention import LogitTransform
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.cache.layer import EvictingLayer
from h2o_stream.cache.recurrent import RecurrentLayer, states_of
from h2o_stream.gpu import mixers
from h2o_stream.gpu.groups import limits_of
from h2o_stream.gpu.joint_steps import Tables, step_streams
from h2o_stream.gpu.journal import Journal, MixerJournal
from h2o_stream.gpu.kernels import GpuKernels, NewTokens, Norms
from h2o_stream.gpu.layers import OrderedHeads, in_order
from h2o_stream.gpu.matrices import norm_in_place
from h2o_stream.native.attention import Attention
from h2o_stream.native.description import Description, Norm
from h2o_stream.native.mixers import Mixer


class StreamAttention:
    """Attends and evicts, or takes tokens through states; counts no tokens.

    Args:
        description: of a model that `layers.why_not` has no objection to.
        cache: its slots and states are written.
    """

    def __init__(self, description: Description, cache: H2OCache, kernels: GpuKernels) -> None:
        self._cache, self._kernels = cache, kernels
        self._device = description.embedding.weights.device
        self._ordered: dict[Attention, OrderedHeads] = {}
        self._mixers = {number: layer.mixer for number, layer in enumerate(description.layers) if layer.mixer}
        for layer in description.layers:
            if attention := layer.attention:
                source = None if attention.source is None else description.layers[attention.source].attention
                ordered = in_order(attention, source)
                order = None if ordered.order is None else ordered.order.to(self._device)
                self._ordered[attention] = ordered._replace(order=order)

    def begin(self, rows: int) -> None:
        """Hold states of B rows, zero where there are none yet."""
        for number, mixer in self._mixers.items():
            layer = self._cache.layers[number]
            assert isinstance(layer, RecurrentLayer)
            layer.begin(mixer.states, rows, self._device)

    def new_journal(self, count: int, dtype: torch.dtype) -> Journal:
        """Of passes of up to so many tokens, which are computed in this dtype."""
        recurrent = [
            MixerJournal(number, mixer, states_of(self._cache.layers[number]), count, dtype)
            for number, mixer in self._mixers.items()
        ]
        return Journal(self._cache.head_groups, count - 1, recurrent)

    def steps(
        self, number: int, part: Attention | Mixer, projected: Tensor, out: Tensor | None = None, rows: int = 1,
        journal: Journal | None = None, beside: Sequence[H2OCache] = (), tables: Tables | None = None,
    ) -> Tensor:  # fmt: skip
        """One token after another of each row.

        Args:
            number: number of the layer.
            part: what of the layer mixes tokens.
            projected: [B Q, n] queries, keys and values, or what a mixer projects.
            out: [B Q, columns of its last matrix], is written; None: a new one.
            rows: B.
            journal: notes the slots before all but the first token.
            beside: the caches of all rows, if they are separate streams, with head groups like those of this one,
            tables: and what `step_streams` keeps of them.

        Returns:
            `out`.
        """
        if not isinstance(part, Attention):
            if journal and len(projected) > rows:
                journal.note_states(number, projected)
            return self._mix(number, part, projected, out, rows)
        (heads, out), ordered = self._heads(part, projected, out, rows), self._ordered[part]
        query, key = ordered.query_norm, ordered.key_norm
        norms = Norms(query.weight, key.weight, query.epsilon, key.epsilon, part.rope.scale if part.rope else 1.0)
        transform, lengths = _transform(part), self._cache.tokens.lengths
        _heat(part, heads.query, [cache.layers[number] for cache in beside or [self._cache]])
        for place, group in enumerate(self._cache.layers[number].head_groups):
            if tables is not None:
                groups = [(cache.layers[number].head_groups[place], cache.tokens.lengths) for cache in beside]
                step_streams(self._kernels, groups, heads.one(0, group.heads), transform, norms, tables)
                continue
            for token in range(heads.out.shape[2]):
                if token and journal:
                    journal.note(group, token)
                self._kernels.step(group, heads.one(token, group.heads), transform, lengths, norms)
        return _finished(part, projected, out)

    def prompt(
        self, number: int, part: Attention | Mixer, projected: Tensor, out: Tensor | None = None, rows: int = 1,
        offset: int = 0, lanes: int = 1, lane: int = 0, before: Any = None,
    ) -> Tensor:  # fmt: skip
        """Tokens that come `offset` after the counted ones, chunk after chunk; waits for an event `before`. The rest as
        in `steps` and `GpuKernels.prompt`.
        """
        if before:
            torch.cuda.current_stream().wait_event(before)
        if not isinstance(part, Attention):
            return self._mix(number, part, projected, out, rows, in_prompt=True)
        (heads, out), ordered = self._heads(part, projected, out, rows), self._ordered[part]
        new = heads.out.shape[2]
        _heat(part, heads.query, [self._cache.layers[number]], offset)
        _norm(heads.query, ordered.query_norm)
        _norm(heads.key, ordered.key_norm)
        starts = [(length + offset, new) for length in self._cache.tokens.lengths or (0,) * rows]
        for group in self._cache.layers[number].head_groups:
            of_group, transform = heads._replace(heads=group.heads), _transform(part)
            factor, limits = part.rope.scale if part.rope else 1.0, limits_of(group, starts, new)
            self._kernels.prompt(group, of_group, transform, None, limits, offset, factor, lanes, lane)
        return _finished(part, projected, out)

    def _mix(
        self, number: int, mixer: Mixer, projected: Tensor, out: Tensor | None, rows: int, in_prompt: bool = False
    ) -> Tensor:
        out = projected.new_empty(len(projected), mixer.out.columns) if out is None else out
        mixers.mix(mixer, projected, states_of(self._cache.layers[number]), out, rows, in_prompt)
        return out

    def _heads(self, part: Attention, projected: Tensor, out: Tensor | None, rows: int) -> tuple[NewTokens, Tensor]:
        """The heads of B Q tokens as views of what was projected, and [B Q, Hq Dv] for their outputs."""
        at, _, _, order = self._ordered[part]
        if out is None:
            out = projected.new_empty(len(projected), part.out.columns)
        if part.clip:
            projected.clamp_(-part.clip, part.clip)
        if part.norms_all_heads:
            parts = (part.heads.query_offset, part.query_norm), (part.heads.key_offset, part.key_norm)
            norm_in_place(projected, *parts)
        projected = projected if order is None else projected.index_select(1, order)
        (tokens, total), first = projected.shape, projected.storage_offset()
        new = tokens // rows

        def heads(count: int, size: int, offset: int, stride: int) -> Tensor:
            return projected.as_strided((rows, count, new, size), (new * total, stride, total, 1), first + offset)

        query = heads(part.query_heads, part.head_size, at.query_offset, at.query_stride)
        key = heads(part.kv_heads, part.head_size, at.key_offset, at.key_stride)
        value = heads(part.kv_heads, part.value_size, at.value_offset, at.value_stride)
        _norm(value, part.value_norm)
        if part.value_scale != 1:
            value.mul_(part.value_scale)
        return NewTokens(query, key, value, out.view(rows, new, part.query_heads, -1).transpose(1, 2)), out


def _transform(attention: Attention) -> LogitTransform:
    return LogitTransform(attention.scaling, attention.softcap or None, attention.sink_logits)


def _norm(x: Tensor, norm: Norm) -> None:
    """Put heads [..., D] under a norm, in place."""
    if norm.weight is not None:
        x.copy_(functional.rms_norm(x.float(), x.shape[-1:], norm.weight, norm.epsilon))


def _heat(attention: Attention, query: Tensor, layers: Sequence[EvictingLayer], offset: int = 0) -> None:
    """Multiply queries [B, Hq, Q, D], `offset` after the counted tokens, by their `Temperature`, in place."""
    temperature = attention.temperature
    if temperature and not temperature.of_positions:  # these are 0, and the factor is 1
        seen = torch.cat([layer.head_groups[0].seen.flatten() for layer in layers])
        index = seen[:, None] + torch.arange(offset, offset + query.shape[2], device=seen.device)
        factor = 1 + temperature.scale * ((index + temperature.start) / temperature.length).floor().log1p()
        query.mul_(factor[:, None, :, None])


def _finished(attention: Attention, projected: Tensor, out: Tensor) -> Tensor:
    """`out`, multiplied by gates if the attention has some, and under its norm."""
    if attention.gate:
        mixers.apply_gate(attention.gate, projected, out, attention.query_heads)
    if attention.output_norm.kind:
        norm_in_place(out, (0, attention.output_norm))
    return out
