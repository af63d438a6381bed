"""Describes the attention of a layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from h2o_stream.native import layouts
from h2o_stream.native.abi import GateKind
from h2o_stream.native.attention import (
    Attention,
    Gate,
    HeadOffsets,
    Latent,
    Rope,
    Temperature,
    shared_kv_attention,
)
from h2o_stream.native.description import DescriptionError, Matrix, Norm
from h2o_stream.native.latent import LatentSizes, latent_attention
from h2o_stream.native.layouts import AttentionLayout
from h2o_stream.native.module_reader import ModuleReader, check_flags, has_modules
from h2o_stream.native.rotary_modules import rope_of
from h2o_stream.native.torch_modules import as_float32


class AttentionReader(ModuleReader):
    """Reads attentions, in the order of their layers."""

    _rotary: Any = None
    _rotary_by_theta: dict[float, Any]

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._attentions: dict[int, Attention] = {}

    def _attention(self, module: Any, index: int) -> Attention:
        name = f"the attention of layer {index}"
        self._mark_container(module, name, layouts.SINKS)
        check_flags(name, lambda flag: getattr(module, flag, None))
        if not isinstance(getattr(module, "scaling", None), float):
            raise DescriptionError(f"{name} has no scaling")
        latent = has_modules(module, layouts.LATENT)
        described = (
            self._latent_attention(module, index, name) if latent else self._plain_attention(module, index, name)
        )
        described = replace(
            described,
            softcap=float(getattr(module, "attn_logit_softcapping", None) or 0.0),
            sink_logits=as_float32(getattr(module, layouts.SINKS, None), name),
            temperature=self._temperature(module, name),
            output_norm=self._optional_norm(module, layouts.OUTPUT_NORM, described.out.columns, name),
            clip=float(getattr(self._config, "clip_qkv", None) or 0.0),
            value_scale=float(getattr(module, "v_scale", 1.0)),
        )
        normed = described.query_norm.kind or described.key_norm.kind
        if described.clip and (described.latent or described.gate or normed):
            raise DescriptionError(f"{name} clips latent vectors, gates, or what it has normed")
        self._attentions[index] = described
        return described

    def _optional_norm(self, module: Any, key: str, size: int, name: str) -> Norm:
        return self._norm(module, key, size, name) if has_modules(module, (key,)) else Norm()

    def _plain_attention(self, module: Any, index: int, name: str) -> Attention:
        size = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
        fitting = (one for one in layouts.ATTENTIONS if has_modules(module, (*one.needed(module), one.out)))
        layout = max(fitting, key=lambda layout: has_modules(module, layout.norms), default=None)
        if layout is None or size is None:
            raise DescriptionError(f"layer {index} has a {type(module).__name__} where an attention is expected")
        source = self._source(module, index, name)
        qkv = [self._matrix(module, key, name) for key in layout.needed(module)]
        out = self._matrix(module, layout.out, name)
        if source is not None:
            return self._shared_kv_attention(module, layout, qkv[0], out, index, source, size, name)
        if has_modules(module, ("k_proj",)) and getattr(module, "v_proj", layouts) is None:
            heads, kv_heads, value_size, offsets = _heads_without_values(qkv, size, out.columns, name)
        else:
            heads, kv_heads, value_size, offsets = _head_layout(qkv, layout, size, out.columns, name)
        gate, gates = self._gate(module, heads, value_size, sum(matrix.rows for matrix in qkv), name)
        if _is_gated(qkv, out.columns):
            gate = Gate(GateKind.SIGMOID_GATE, size, 2 * size, size)
        normed = [key for key in layout.norms if has_modules(module, (key,))]
        whole = any(_weight_count(getattr(module, key)) > size for key in normed)
        sizes = dict(zip(layout.norms, (heads * size, kv_heads * size) if whole else (size, size), strict=True))
        norms = [self._norm(module, key, sizes[key], name) if key in normed else Norm() for key in layout.norms]
        return Attention(
            query_heads=heads,
            kv_heads=kv_heads,
            head_size=size,
            value_size=value_size,
            scaling=module.scaling,
            softcap=0.0,
            qkv=[*qkv, *gates],
            heads=offsets,
            query_norm=norms[0],
            key_norm=norms[1],
            rope=self._rope(module, size, index, name),
            out=out,
            norms_all_heads=whole,
            norms_after_rope=layout.norms_after_rope and bool(normed),
            value_norm=self._optional_norm(module, layouts.VALUE_NORM, value_size, name),
            gate=gate,
        )

    def _gate(
        self, module: Any, heads: int, value_size: int, column: int, name: str
    ) -> tuple[Gate | None, list[Matrix]]:
        """The gate of an attention's output, and its matrix, whose output starts at a column."""
        key = next((key for key in layouts.GATES if has_modules(module, (key,))), None)
        if key is None:
            return None, []
        matrix = self._matrix(module, key, name)
        size, rest = divmod(matrix.rows, heads)
        if rest or size not in (1, value_size):
            raise DescriptionError(f"{key} of {name} gives {matrix.rows} outputs for {heads} heads of {value_size}")
        return Gate(layouts.gate_kind(module, key), column, size, size), [matrix]

    def _source(self, module: Any, index: int, name: str) -> int | None:
        """The earlier layer whose keys and values an attention uses, None if it has its own."""
        if not getattr(module, layouts.BORROWS, False):
            return None
        kinds = self._config.layer_types
        own = (number for number, attention in self._attentions.items() if attention.source is None)
        lenders = [number for number in own if kinds[number] == kinds[index]]
        if not lenders:
            raise DescriptionError(f"{name} uses keys of an earlier layer, and there is none of its kind")
        return lenders[-1]

    def _shared_kv_attention(
        self,
        module: Any,
        layout: AttentionLayout,
        query: Matrix,
        out: Matrix,
        index: int,
        source: int,
        size: int,
        name: str,
    ) -> Attention:
        """An attention with the keys and values of an earlier layer."""
        norm = self._optional_norm(module, layout.norms[0], size, name)
        rope = self._rope(module, size, index, name)
        return shared_kv_attention(self._attentions[source], source, size, query, norm, rope, out, module.scaling, name)

    def _latent_attention(self, module: Any, index: int, name: str) -> Attention:
        """Queries, keys and values from latent vectors; the last part of all keys is the same and is rotated."""
        down_key, norm_key, up_key, out_key = layouts.LATENT
        rope_size, nope_size, value_size, rank = (
            getattr(module, key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
        )
        sizes = LatentSizes(rank, rope_size, nope_size, value_size)
        first = "q_a_proj" if has_modules(module, ("q_a_proj",)) else "q_proj"
        queries, down = (self._matrix(module, key, name) for key in (first, down_key))
        query_up = None
        if first == "q_a_proj":
            norm = self._norm(module, "q_a_layernorm", queries.rows, name)
            query_up = Latent(self._matrix(module, "q_b_proj", name), norm, 0, 0)
        out = self._matrix(module, out_key, name)
        rope = self._rope(module, sizes.head_size, index, name, tail=rope_size)
        elements = None
        if rope is not None and getattr(self._config, "rope_interleave", False):
            pairs = torch.arange(rope_size).view(-1, 2).T.flatten() + nope_size
            elements = torch.cat((torch.arange(nope_size), pairs)).int()
        return latent_attention(
            sizes,
            queries,
            query_up,
            down,
            self._matrix(module, up_key, name),
            self._norm(module, norm_key, rank, name),
            out,
            module.scaling,
            rope,
            elements,
            name,
        )

    def _rope(self, module: Any, size: int, index: int, name: str, tail: int = 0) -> Rope | None:
        """The rotations of an attention, None if there are none; with `tail` only of the last elements of a head."""
        kinds = getattr(self._config, "layer_types", None)
        rotary = self._rotary
        if self._rotary_by_theta:
            theta = self._config.layer_rope_theta[index]
            rotary = self._rotary_by_theta[theta] if theta else None
        if (own := getattr(module, "rotary_emb", None)) is not None:
            self._mark_read(own)
            rotary = own
        if rotary is None or not layouts.rotates(module):
            return None
        return rope_of(rotary, kinds[index] if kinds else None, module, size, name, tail)

    def _temperature(self, module: Any, name: str) -> Temperature | None:
        """The factors on queries by position (Ministral 3), or by token index without RoPE (Llama 4)."""
        parameters = getattr(self._config, "rope_parameters", None) or {}
        if scale := parameters.get("llama_4_scaling_beta"):
            length = parameters.get("original_max_position_embeddings")
            if not isinstance(length, int):
                raise DescriptionError(f"{name} has temperatures of an unknown form")
            return Temperature(float(scale), float(length), 0, of_positions=True)
        if not getattr(module, "attn_temperature_tuning", None) or layouts.rotates(module):
            return None
        length, scale = getattr(module, "floor_scale", None), getattr(module, "attn_scale", None)
        if not isinstance(length, int | float) or not isinstance(scale, int | float):
            raise DescriptionError(f"{name} has temperatures of an unknown form")
        return Temperature(float(scale), float(length), 1)


def _weight_count(module: Any) -> int:
    """How many weights a norm has; 0 without any."""
    weight = getattr(module, "weight", None)
    return 0 if weight is None else int(weight.numel())


def _heads_without_values(qkv: list[Matrix], size: int, columns: int, name: str) -> tuple[int, int, int, HeadOffsets]:
    """The same as `_head_layout` where keys, before they are normed, are values, too."""
    query, key = (matrix.rows for matrix in qkv)
    heads, kv_heads = query // size, key // size
    if (query, key, columns) != (heads * size, kv_heads * size, heads * size) or kv_heads < 1 or heads % kv_heads:
        raise DescriptionError(f"{name} has matrices that are not a whole number of heads of size {size}")
    return heads, kv_heads, size, HeadOffsets(0, size, query, size, query, size)


def _is_gated(qkv: list[Matrix], columns: int) -> bool:
    """Whether the first of three projections gives each head a query and a gate of its output [columns].

    Values are as large as keys then; where they are half as large, queries have twice the size of the output, too.
    """
    return len(qkv) == 3 and qkv[0].rows == 2 * columns and qkv[1].rows == qkv[2].rows


def _head_layout(
    qkv: list[Matrix], layout: AttentionLayout, size: int, columns: int, name: str
) -> tuple[int, int, int, HeadOffsets]:
    """Derive query heads, KV heads, value size and offsets from the sizes of the matrices."""
    if layout.order == "interleaved":
        heads = qkv[0].rows // (3 * size)
        offsets = HeadOffsets(0, 3 * size, size, 3 * size, 2 * size, 3 * size)
        counts = heads, heads, size
        total = 3 * heads * size
    elif len(qkv) == 1:
        heads = columns // size
        kv_heads = (qkv[0].rows - columns) // (2 * size)
        offsets = HeadOffsets(0, size, columns, size, columns + kv_heads * size, size)
        counts = heads, kv_heads, size
        total = (heads + 2 * kv_heads) * size
    else:
        q, k, v = (matrix.rows for matrix in qkv)
        stride = 2 * size if _is_gated(qkv, columns) else size
        heads, kv_heads = q // stride, k // size
        value_size = v // max(1, kv_heads)
        offsets = HeadOffsets(0, stride, q, size, q + k, value_size)
        counts = heads, kv_heads, value_size
        total = heads * stride + kv_heads * (size + value_size)
    heads, kv_heads, value_size = counts
    fits = sum(matrix.rows for matrix in qkv) == total and columns == heads * value_size
    if not fits or kv_heads < 1 or heads % kv_heads:
        raise DescriptionError(f"{name} has matrices that are not a whole number of heads of size {size}")
    return heads, kv_heads, value_size, offsets
