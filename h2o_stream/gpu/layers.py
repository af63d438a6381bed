"""Runs the layers of a described model by a few kernels each: five, for few rows of a Llama.

Products of more rows are the library's; of few rows they are `gemv_kernel`, which takes norms, gates and residuals with
it. Weights stay where the model has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
import triton
from torch import Tensor

from h2o_stream.gpu import mixers, mlps
from h2o_stream.gpu.matrices import gemv, in_products, multiply, overlapping, rows_of
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
    whole = (description.learned_positions, description.layer_embeddings, description.versions)
    if any(part is not None for part in whole) or description.embedding_norm.kind:
        return "its embeddings are special"
    matrices = [description.embedding, *description.matrices]
    if any(matrix.kind not in mlps.DENSE and not isinstance(matrix, BlockMatrix) for matrix in matrices):
        return "its weights are packed for a CPU, or in columns"
    return next(filter(None, map(_why_not_layer, description.layers)), "")


def _why_not_layer(layer: Layer) -> str:
    attention, mlp = layer.attention, layer.mlp
    if layer.own_embedding or layer.altup or layer.laurel or layer.output_scale != 1:
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
    if attention.norms_all_heads or attention.norms_after_rope or any(x.bias is not None for x in norms):
        return "its queries and keys are normed in another way"
    if any(norm.kind == NormKind.LAYER for norm in norms) or bool(norms[0].kind) != bool(norms[1].kind):
        return "its queries and keys are normed in another way"
    if attention.columns or attention.key_tail or attention.latent or attention.source is not None:
        return "queries and keys are made in another way"
    normed = attention.value_norm.kind or attention.output_norm.kind
    if normed or attention.temperature or attention.clip or attention.value_scale != 1:
        return "its attention is special"
    return ""


def in_order(attention: Attention) -> tuple[Attention, Tensor | None]:
    """An attention whose heads follow one another, as the cache stores them, and where its numbers are; None: there."""
    order, size, width = attention.elements, attention.head_size, attention.value_size
    rotated = attention.rope.order if attention.rope else None
    if rotated is not None:
        order = rotated if order is None else order[rotated.long()]
    if order is None:
        return attention, None
    at, queries, keys = attention.heads, attention.query_heads, attention.kv_heads

    def places(offset: int, stride: int, count: int, within: Tensor) -> Tensor:
        return (offset + stride * torch.arange(count)[:, None] + within.long().cpu()).flatten()

    index = [
        places(at.query_offset, at.query_stride, queries, order), places(at.key_offset, at.key_stride, keys, order),
        places(at.value_offset, at.value_stride, keys, torch.arange(width)),
    ]  # fmt: skip
    norms = [
        replace(norm, weight=norm.weight[rotated.long().to(norm.weight.device)])
        if rotated is not None and norm.weight is not None
        else norm
        for norm in (attention.query_norm, attention.key_norm)
    ]
    heads = HeadOffsets(0, size, queries * size, size, (queries + keys) * size, width)
    return replace(attention, heads=heads, query_norm=norms[0], key_norm=norms[1]), torch.cat(index)


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


def embedded(description: Description, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, hidden] of n tokens."""
    rows = rows_of(description.embedding, tokens.flatten(), dtype)
    return rows if description.embedding_scale == 1 else rows * description.embedding_scale


def run(description: Description, x: Tensor, mix: MixTokens) -> Residual:
    """Take embeddings [rows, hidden] through all layers."""
    stream = Residual(x, description.residual_scale)
    for number, layer in enumerate(description.layers):
        attention, mixer, mlp = layer.attention, layer.mixer, layer.mlp
        normed = stream.normed(layer.before_attention) if attention or mixer else (stream.x, NO_NORM)
        projected: list[tuple[Attention | Mixer, Tensor]] = []
        if attention:
            projected.append((attention, multiply(attention.qkv, *normed)))
        if mixer:
            projected.append((mixer, multiply(mixer.projections, *normed)))
        before = stream.normed(layer.before_mlp) if layer.parallel else None
        for part, products in projected:
            stream.add(part.out, mix(number, part, products), layer.after_attention)
        if mlp is None:
            continue
        inputs, norm = before or stream.normed(layer.before_mlp)
        if isinstance(mlp, Experts):
            stream.add_products(mlps.mixed(mlp, inputs, norm), layer.after_mlp)
        else:
            assert isinstance(mlp, Mlp)
            stream.add(mlp.down, mlps.inner(mlp, inputs, norm), layer.after_mlp)
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
