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
from h2o_stream.cache.recurrent import RecurrentLayer, states_of
from h2o_stream.gpu import mixers
from h2o_stream.gpu.groups import limits_of
from h2o_stream.gpu.joint_steps import Tables, step_streams
from h2o_stream.gpu.journal import Journal, MixerJournal
from h2o_stream.gpu.kernels import GpuKernels, NewTokens, Norms
from h2o_stream.gpu.layers import in_order
from h2o_stream.native.attention import Attention
from h2o_stream.native.description import Description
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
        self._ordered: dict[Attention, tuple[Attention, Tensor | None, Tensor | None]] = {}
        self._mixers = {number: layer.mixer for number, layer in enumerate(description.layers) if layer.mixer}
        for layer in description.layers:
            if attention := layer.attention:
                ordered, order = in_order(attention)
                sinks = attention.sink_logits
                self._ordered[attention] = (
                    ordered,
                    None if order is None else order.to(self._device),
                    None if sinks is None else sinks.to(self._device),
                )

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
        (attention, _, sinks), (heads, out) = self._ordered[part], self._heads(part, projected, out, rows)
        query, key = attention.query_norm, attention.key_norm
        factor = attention.rope.scale if attention.rope else 1.0
        norms = Norms(query.weight, key.weight, query.epsilon, key.epsilon, factor)
        transform, lengths = _transform(attention, sinks), self._cache.tokens.lengths
        for place, group in enumerate(self._cache.layers[number].head_groups):
            if tables is not None:
                groups = [(cache.layers[number].head_groups[place], cache.tokens.lengths) for cache in beside]
                step_streams(self._kernels, groups, heads.one(0, group.heads), transform, norms, tables)
                continue
            for token in range(heads.out.shape[2]):
                if token and journal:
                    journal.note(group, token)
                self._kernels.step(group, heads.one(token, group.heads), transform, lengths, norms)
        return _gated(attention, projected, out)

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
        (attention, _, sinks), (heads, out) = self._ordered[part], self._heads(part, projected, out, rows)
        new = heads.out.shape[2]
        for x, norm in ((heads.query, attention.query_norm), (heads.key, attention.key_norm)):
            if norm.weight is not None:
                x.copy_(functional.rms_norm(x.float(), x.shape[-1:], norm.weight, norm.epsilon))
        starts = [(length + offset, new) for length in self._cache.tokens.lengths or (0,) * rows]
        for group in self._cache.layers[number].head_groups:
            of_group, transform = heads._replace(heads=group.heads), _transform(attention, sinks)
            factor, limits = attention.rope.scale if attention.rope else 1.0, limits_of(group, starts, new)
            self._kernels.prompt(group, of_group, transform, None, limits, offset, factor, lanes, lane)
        return _gated(attention, projected, out)

    def _mix(
        self, number: int, mixer: Mixer, projected: Tensor, out: Tensor | None, rows: int, in_prompt: bool = False
    ) -> Tensor:
        out = projected.new_empty(len(projected), mixer.out.columns) if out is None else out
        mixers.mix(mixer, projected, states_of(self._cache.layers[number]), out, rows, in_prompt)
        return out

    def _heads(self, part: Attention, projected: Tensor, out: Tensor | None, rows: int) -> tuple[NewTokens, Tensor]:
        """The heads of B Q tokens as views of what was projected, and [B Q, Hq Dv] for their outputs."""
        attention, order, _ = self._ordered[part]
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


def _transform(attention: Attention, sinks: Tensor | None) -> LogitTransform:
    return LogitTransform(attention.scaling, attention.softcap or None, sinks)


def _gated(attention: Attention, projected: Tensor, out: Tensor) -> Tensor:
    """`out`, multiplied by gates if the attention has some."""
    if attention.gate:
        mixers.apply_gate(attention.gate, projected, out, attention.query_heads)
    return out
