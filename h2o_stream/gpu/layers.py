"""Runs the layers of a described model by a few kernels each: five, for few rows of a Llama.

Products of more rows are the library's; of few rows they are `gemv_kernel`, which takes norms, gates and residuals with
it. Weights stay where the model has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch
import triton
from torch import Tensor
from torch.nn import functional

from h2o_stream.gpu import mixers, mlps
from h2o_stream.gpu.matrices import gemv, in_products, multiply, norm_in_place, overlapping, rows_of
from h2o_stream.gpu.packed import FEW, BlockMatrix
from h2o_stream.gpu.products import norm_kernel
from h2o_stream.native.abi import NormKind
from h2o_stream.native.attention import Attention, HeadOffsets
from h2o_stream.native.description import Description, Layer, Matrix, Mlp, Norm
from h2o_stream.native.experts import Experts
from h2o_stream.native.matrix import NO_NORM
from h2o_stream.native.mixers import Mixer

MixTokens: TypeAlias = Callable[[int, Attention | Mixer, Tensor], Tensor]
"""Takes the number of a layer, its attention or recurrent mixer, and [rows, n] that it has projected; returns what its
last matrix is multiplied with."""


def why_not(description: Description) -> str:
    """Why the kernels do not compute this model, or nothing."""
    norms = [description.embedding_norm, *([x.norm] if (x := description.layer_embeddings) else [])]
    special = description.learned_positions is not None or description.versions
    if special or any(norm.kind and not in_products(norm) for norm in norms):
        return "its embeddings are special"
    matrices = [description.embedding, *description.matrices]
    if any(matrix.kind not in mlps.DENSE and not isinstance(matrix, BlockMatrix) for matrix in matrices):
        return "its weights are packed for a CPU"
    return next(filter(None, map(_why_not_layer, description.layers)), "")


def _why_not_layer(layer: Layer) -> str:
    attention, mlp = layer.attention, layer.mlp
    if layer.altup or layer.laurel or (layer.own_embedding and not isinstance(mlp, Mlp)):
        return "its layers are special"
    if attention and layer.mixer and layer.after_attention.kind:
        return "the sum of its attention and recurrent layers is normed"
    if mlp and (reason := mlps.why_not(mlp)):
        return reason
    if layer.mixer and (reason := mixers.why_not(layer.mixer)):
        return reason
    return _why_not_attention(attention) if attention else ""


def _why_not_attention(attention: Attention) -> str:
    norms = attention.query_norm, attention.key_norm
    if attention.norms_after_rope or any(norm.kind and not in_products(norm) for norm in norms):
        return "its queries and keys are normed in another way"
    if bool(norms[0].kind) != bool(norms[1].kind) or (norms[0].kind and attention.temperature):
        return "its queries and keys are normed in another way"
    at, size = attention.heads, attention.head_size
    if attention.norms_all_heads and (at.query_stride, at.key_stride) != (size, size):
        return "its queries and keys are normed in another way"
    others = [attention.value_norm, attention.output_norm, *(latent.norm for latent in attention.latent)]
    return "its attention is special" if any(norm.kind and not in_products(norm) for norm in others) else ""


class OrderedHeads(NamedTuple):
    """Heads of an attention that follow one another, as the cache stores them, under norms of their own.

    Attributes:
        order: [n] int64, where their numbers are; None: there.
    """

    heads: HeadOffsets
    query_norm: Norm
    key_norm: Norm
    order: Tensor | None


def in_order(attention: Attention, lender: Attention | None) -> OrderedHeads:
    """The heads of an attention whose norms of all heads, if there are some, were applied; see `_projected`."""
    order, size, width, tail = attention.elements, attention.head_size, attention.value_size, attention.key_tail
    rotated = attention.rope.order if attention.rope else None
    if rotated is not None:
        order = rotated if order is None else order[rotated.long()]

    def of_heads(norm: Norm) -> Norm:
        if attention.norms_all_heads or rotated is None or norm.weight is None:
            return NO_NORM if attention.norms_all_heads else norm
        return replace(norm, weight=norm.weight[rotated.long().to(norm.weight.device)])

    norms = of_heads(attention.query_norm), of_heads(attention.key_norm)
    at, queries, keys = attention.heads, attention.query_heads, attention.kv_heads
    if starts := (lender or attention).columns:
        matrices, start = (lender or attention).qkv, attention.qkv[0].rows if lender else 0
        place = dict(zip(starts, accumulate((matrix.rows for matrix in matrices), initial=start), strict=False))
        at = replace(at, key_offset=place[at.key_offset], value_offset=place[at.value_offset])
    if order is None and tail is None and at.key_offset != at.value_offset:
        return OrderedHeads(at, *norms, None)
    within = torch.arange(size) if order is None else order.long().cpu()

    def places(offset: int, stride: int, count: int, within: Tensor) -> Tensor:
        return offset + stride * torch.arange(count)[:, None] + within

    of_keys = places(at.key_offset, at.key_stride, keys, within)
    if tail:
        beyond = within - (size - tail.size)
        of_keys = torch.where(beyond < 0, of_keys, tail.offset + beyond)
    index = [
        places(at.query_offset, at.query_stride, queries, within), of_keys,
        places(at.value_offset, at.value_stride, keys, torch.arange(width)),
    ]  # fmt: skip
    heads = HeadOffsets(0, size, queries * size, size, (queries + keys) * size, width)
    return OrderedHeads(heads, *norms, torch.cat([x.flatten() for x in index]))


class Residual:
    """The residual stream [rows, hidden] of one pass, and what has still to be added to it.

    Args:
        x: written in place.
        scale: factor on what is added.
    """

    def __init__(self, x: Tensor, scale: float) -> None:
        self.x, self.scale = x, scale
        self._added: Tensor | None = None
        self._after = NO_NORM

    @property
    def few_rows(self) -> bool:
        """Whether products take norms and residuals with them."""
        return len(self.x) <= FEW

    def normed(self, norm: Norm) -> tuple[Tensor, Norm]:
        """The stream under a norm, and that norm if the product has to apply it."""
        if self.few_rows and self._added is None and (not norm.kind or in_products(norm)):
            return self.x, norm
        out = self._fold(norm)
        return (self.x if out is None else out), NO_NORM

    def add(self, matrix: Matrix, x: Tensor, after: Norm) -> None:
        """Add a product [rows, *] with a matrix, under a norm."""
        if self._added is not None:
            self._fold(NO_NORM)
        if self.few_rows and not after.kind:
            self.x = gemv([matrix], x, added=self.x, add_scale=self.scale)
        else:
            self._added, self._after = multiply([matrix], x), after

    def add_products(self, products: Tensor, after: Norm) -> None:
        """Add products [rows, hidden] that are there already, under a norm."""
        if self._added is not None:
            self._fold(NO_NORM)
        self._added, self._after = products, after

    def folded(self) -> Tensor:
        """The stream, with everything added."""
        self._fold(NO_NORM)
        return self.x

    def _fold(self, norm: Norm) -> Tensor | None:
        """Add what is to be added, in place; the stream under a norm, if it is one."""
        out = torch.empty_like(self.x) if norm.kind else None
        if out is not None or self._added is not None:
            rows, size = self.x.shape
            norm_kernel[(rows,)](
                self.x, self._added, self._after.weight, self._after.bias, norm.weight, norm.bias, out,
                self._after.epsilon, norm.epsilon, self.scale, K=size, AFTER_LAYER=self._after.kind == NormKind.LAYER,
                BEFORE_LAYER=norm.kind == NormKind.LAYER, BK=triton.next_power_of_2(size), num_warps=8,
                **overlapping(self.x),
            )  # fmt: skip
        self._added, self._after = None, NO_NORM
        return out


def _embedded(description: Description, tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """[n, hidden] of n tokens, and [layers, n, size] for each layer, if there are such."""
    rows = rows_of(description.embedding, tokens.flatten(), dtype)
    if description.embedding_scale != 1:
        rows = rows * description.embedding_scale
    if description.embedding_norm.kind:
        norm_in_place(rows, (0, description.embedding_norm))
    parts = description.layer_embeddings
    if parts is None:
        return rows, None
    shape, norm = (len(rows), len(description.layers), -1), parts.norm
    of_rows = (multiply([parts.projection], rows) * parts.projection_scale).view(shape)
    of_rows = functional.rms_norm(of_rows.float(), of_rows.shape[2:], norm.weight, norm.epsilon).to(dtype)
    of_tokens = rows_of(parts.embedding, tokens.flatten(), dtype).view(shape) * parts.scale
    return rows, ((of_rows + of_tokens) * parts.output_scale).transpose(0, 1).contiguous()


def _projected(attention: Attention, x: Tensor, norm: Norm, lent: dict[int, Tensor]) -> Tensor:
    """[rows, n] queries, keys and values, or what they are made of: the vector of `Attention.qkv`, without gaps.

    Of a layer that uses the keys and values of an earlier one, it is queries, and then that layer's, which was `lent`.
    """
    vector = multiply(attention.qkv, x, norm)
    if attention.source is not None:
        vector = torch.cat((vector, lent[attention.source]), 1)
    for latent in attention.latent:
        part = vector[:, latent.start : latent.start + latent.matrix.columns].contiguous()
        few = len(x) <= FEW
        if latent.norm.kind and not few:
            norm_in_place(part, (0, latent.norm))
        vector = torch.cat((vector, multiply([latent.matrix], part, latent.norm if few else NO_NORM)), 1)
    return vector


def run(description: Description, tokens: Tensor, dtype: torch.dtype, mix: MixTokens) -> Residual:
    """Take tokens, a row of the stream each, through all layers."""
    x, of_layers = _embedded(description, tokens, dtype)
    stream, lent = Residual(x, description.residual_scale), dict[int, Tensor]()
    for number, layer in enumerate(description.layers):
        attention, mixer, mlp = layer.attention, layer.mixer, layer.mlp
        normed = stream.normed(layer.before_attention) if attention or mixer else (stream.x, NO_NORM)
        projected: list[tuple[Attention | Mixer, Tensor]] = []
        if attention:
            vector = _projected(attention, *normed, lent)
            if attention.columns:
                lent[number] = vector.clone()  # it is written in place
            projected.append((attention, vector))
        if mixer:
            projected.append((mixer, multiply(mixer.projections, *normed)))
        before = stream.normed(layer.before_mlp) if layer.parallel else None
        for part, products in projected:
            stream.add(part.out, mix(number, part, products), layer.after_attention)
        if mlp:
            inputs, norm = before or stream.normed(layer.before_mlp)
        if isinstance(mlp, Experts):
            stream.add_products(mlps.mixed(mlp, inputs, norm), layer.after_mlp)
        elif isinstance(mlp, Mlp):
            stream.add(mlp.down, mlps.inner(mlp, inputs, norm), layer.after_mlp)
            if embedding := layer.own_embedding:
                assert of_layers is not None
                gates = multiply([embedding.gate], stream.folded())
                passed = mlps.let_through(gates, of_layers[number], mlp.activation)
                stream.add(embedding.out, passed, embedding.norm)
        if layer.output_scale != 1:
            stream.folded().mul_(layer.output_scale)
    return stream


def logits_of(description: Description, stream: Residual, rows: Tensor | None = None) -> Tensor:
    """[n, V] float32 of some rows [n] int64 of the stream, or of all."""
    if rows is not None:
        stream = Residual(stream.folded()[rows], 1.0)
    logits = multiply([description.output], *stream.normed(description.norm), dtype=torch.float32)
    if description.logit_scale != 1:
        logits = logits * description.logit_scale
    if cap := description.logit_softcap:
        logits = (logits / cap).tanh_() * cap
    return logits
