"""Describes a model by its parameters and weights, from a file or of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream.native.abi import NormKind, Scoring
from h2o_stream.native.attention import (
    Attention,
    Gate,
    HeadOffsets,
    Latent,
    Rope,
    Temperature,
    shared_kv_attention,
    with_lent_columns,
)
from h2o_stream.native.description import (
    DENSE,
    NORM_ROLES,
    Description,
    DescriptionError,
    Layer,
    LayerEmbeddings,
    Matrix,
    Mlp,
    Norm,
    OwnEmbedding,
)
from h2o_stream.native.experts import Experts
from h2o_stream.native.latent import LatentSizes, latent_attention
from h2o_stream.native.matrix import require
from h2o_stream.runtime.altup import layer_altup, layer_laurel, versions_of
from h2o_stream.runtime.families.architecture import EMBEDDING, LAYER_EMBEDDINGS, OUTPUT, POSITIONS, Architecture
from h2o_stream.runtime.file_numbers import rounded
from h2o_stream.runtime.mixers import describe_mixer, has_mixer
from h2o_stream.runtime.mlps import MlpReader
from h2o_stream.runtime.parameters import Parameters
from h2o_stream.runtime.rotations import Floats
from h2o_stream.runtime.weights import Weights


def describe_file(architecture: Architecture, parameters: Parameters, weights: Weights, dtype: str) -> Description:
    """Describe a model from its parameters and weights, with keys and values in ``float32`` or ``bfloat16``.

    Raises:
        DescriptionError: weights are missing, or not packed.
    """
    return _FileReader(architecture, parameters, weights, dtype).read()


class _FileReader:
    def __init__(self, architecture: Architecture, parameters: Parameters, weights: Weights, dtype: str) -> None:
        self._architecture, self._parameters, self._weights, self._dtype = architecture, parameters, weights, dtype
        self._mlps = MlpReader(architecture, parameters, weights, dtype, self._norm)
        self._attentions: dict[int, Attention] = {}

    def read(self) -> Description:
        parameters, weights = self._parameters, self._weights
        shape = parameters.vocabulary, parameters.hidden_size
        embedding = weights.matrix(EMBEDDING, None, shape[0] + parameters.unsaid_tokens, shape[1])
        dense = embedding.kind in DENSE
        layers = [self._layer(number) for number in range(parameters.num_layers)]
        attentions = with_lent_columns([layer.attention for layer in layers])
        final = self._norm(self._architecture.final_norm, None)
        return Description(
            layers=[replace(layer, attention=attention) for layer, attention in zip(layers, attentions, strict=True)],
            embedding=embedding,
            embedding_scale=self._scale_of(embedding, parameters.embedding_scale),
            learned_positions=self._learned_positions(),
            learned_offset=self._architecture.learned_offset,
            embedding_norm=final if self._architecture.norms_embedding else Norm(),
            norm=final,
            output=embedding if parameters.tied else weights.matrix(OUTPUT, None, *shape),
            logit_scale=parameters.logit_scale,
            logit_softcap=parameters.logit_softcap,
            residual_scale=parameters.residual_scale,
            dtype=self._dtype,
            logits_dtype=self._dtype if dense else "float32",
            layer_embeddings=self._layer_embeddings() if parameters.own_embedding else None,
            versions=versions_of(parameters.altup, weights, parameters.hidden_size) if parameters.altup else None,
        )

    def _learned_positions(self) -> Floats | None:
        """[n, hidden], positions that have embeddings."""
        hidden, needed = self._parameters.hidden_size, self._parameters.context + self._architecture.learned_offset
        rows = self._weights.vector(POSITIONS, None)
        require(rows is None or rows.size >= needed * hidden, f"its learned positions are fewer than {needed}")
        return None if rows is None else rows.reshape(-1, hidden)

    def _scale_of(self, embedding: Matrix, scale: float) -> float:
        """The factor on an embedding, rounded as transformers rounds it."""
        if embedding.kind not in DENSE:
            return scale
        return float(rounded(numpy.array([scale], numpy.float32), self._dtype)[0])

    def _constant(self, value: float) -> float:
        """A factor, as transformers has it."""
        if not self._architecture.rounds_constants:
            return value
        return float(rounded(numpy.array([value], numpy.float32), self._dtype)[0])

    def _layer_embeddings(self) -> LayerEmbeddings:
        parameters, weights = self._parameters, self._weights
        size, hidden = parameters.own_embedding, parameters.hidden_size
        columns = size * parameters.num_layers
        tokens = parameters.own_vocabulary or parameters.vocabulary
        embedding = weights.matrix(LAYER_EMBEDDINGS, None, tokens, columns)
        return LayerEmbeddings(
            embedding=embedding,
            projection=weights.matrix("per_layer_model_proj", None, columns, hidden),
            norm=self._norm("per_layer_proj_norm", None),
            scale=self._scale_of(embedding, size**0.5),
            projection_scale=self._constant(hidden**-0.5),
            output_scale=self._constant(2**-0.5),
        )

    def _own_embedding(self, number: int) -> OwnEmbedding | None:
        size, hidden = self._parameters.own_embedding, self._parameters.hidden_size
        if not size:
            return None
        gate = self._weights.matrix("inp_gate", number, size, hidden)
        out = self._weights.matrix("proj", number, hidden, size)
        return OwnEmbedding(gate, out, self._norm("post_norm", number))

    def _norm(self, name: str, layer: int | None, needed: bool = True, bare_size: int = 0) -> Norm:
        """A norm of this name; `bare_size` is its size where norms have no weights, 0: the hidden size."""
        weight = self._weights.vector(name, layer)
        if weight is None and self._architecture.bare_norms and name in self._architecture.checkpoint_names:
            weight = numpy.ones(bare_size or self._parameters.hidden_size, numpy.float32)
        if weight is None:
            if needed:
                raise DescriptionError(f"it has no {name}")
            return Norm()
        bias = self._weights.vector(name, layer, "bias")
        latent = name in ("attn_q_a_norm", "attn_kv_a_norm") and self._parameters.latent_epsilon
        return Norm(self._parameters.norm, weight, bias, latent or self._parameters.epsilon)

    def _layer(self, number: int) -> Layer:
        weights, experts, latent = self._weights, self._parameters.experts, self._parameters.latent
        attends, mixes = weights.has("attn_output", number), has_mixer(weights, number)
        mlp: Mlp | Experts | None = None
        if weights.has("ffn_gate_inp", number):
            if experts is None:
                raise DescriptionError(f"layer {number} has experts, and it is not said how many")
            mlp = self._mlps.experts(number, experts)
        elif weights.has("ffn_down", number):
            mlp = self._mlps.mlp(number, self._parameters.layer_shape(number).inner_size)
        attention = None
        if attends:
            attention = self._latent(number, latent) if latent else self._attention(number)
        names = self._architecture.norms
        if mixes and self._architecture.mixer_norms:
            names = self._architecture.mixer_norms
        if self._architecture.parallel and weights.vector(names["before_mlp"], number) is None:
            names = {**names, "before_mlp": names["before_attention"]}
        if self._architecture.one_part:
            names = {"before_attention" if attends or mixes else "before_mlp": names["before_attention"]}
        optional = self._architecture.optional_norms
        norms = {role: self._norm(name, number, role not in optional) for role, name in names.items()}
        by_role: dict[str, Any] = {role: norms.get(role, Norm()) for role in NORM_ROLES}
        scale, hidden, altup = weights.vector("layer_output_scale", number), self._parameters.hidden_size, None
        if altup_parameters := self._parameters.altup:
            norm = self._norm("altup_router_norm", number)
            altup = layer_altup(altup_parameters, weights, number, norm, self._constant(1 / hidden))
        return Layer(
            attention=attention,
            mixer=describe_mixer(self._architecture, self._parameters, weights, number) if mixes else None,
            mlp=mlp,
            **by_role,
            parallel=self._architecture.parallel,
            own_embedding=self._own_embedding(number),
            output_scale=1.0 if scale is None else float(scale[0]),
            altup=altup,
            laurel=layer_laurel(altup_parameters, weights, number, self._norm("laurel_post_norm", number), hidden)
            if altup_parameters
            else None,
        )

    def _attention(self, number: int) -> Attention:
        parameters, weights, shape = self._parameters, self._weights, self._parameters.layer_shape(number)
        size, source, family = shape.head_size, parameters.shared_kv_layer(number), self._architecture
        heads, value_size = shape.query_heads or parameters.query_heads, parameters.value_size or size
        keys, values = shape.kv_heads * size, shape.kv_heads * value_size
        stride = 2 * size if family.gates_attention else size
        queries = heads * stride
        rows = {"attn_q": queries, "attn_k": keys, "attn_v": values}
        if weights.has("attn_qkv", number):
            rows = {"attn_qkv": queries + keys + values}
        elif source is not None:
            rows = {"attn_q": queries}
        elif not weights.has("attn_v", number):  # keys, before they are normed, are values, too
            del rows["attn_v"]
        offsets = HeadOffsets(0, stride, queries, size, queries if len(rows) == 2 else queries + keys, value_size)
        if family.qkv_by_head:
            offsets = HeadOffsets(0, 3 * size, size, 3 * size, 2 * size, 3 * size)
        gate = Gate(family.gate_kind, size, stride, size) if family.gates_attention else None
        if weights.has("attn_output_gate", number):
            width = parameters.gate_size or value_size
            gate = Gate(family.gate_kind, sum(rows.values()), width, width)
            rows["attn_output_gate"] = heads * width
        norms = [self._norm(name, number, False, size) for name in ("attn_q_norm", "attn_k_norm")]
        if family.bare_norms and parameters.ropes[number] is None:
            norms = [Norm(), Norm()]
        factors, hidden = parameters.multipliers, parameters.hidden_size
        qkv = [
            weights.matrix(name, number, count, hidden).scaled(
                factors.key if name == "attn_k" else 1.0, factors.attention_in
            )
            for name, count in rows.items()
        ]
        out = weights.matrix("attn_output", number, hidden, heads * value_size).scaled(factors.attention_out)
        if source is not None:
            require(source in self._attentions, f"layer {number} uses keys of layer {source}, which has none")
            lender, name = self._attentions[source], f"the attention of layer {number}"
            rope = self._rope(number, size)
            return shared_kv_attention(lender, source, size, qkv[0], norms[0], rope, out, parameters.scaling, name)
        require(not parameters.clip or not (gate or any(norm.kind for norm in norms)), "it clips what it has normed")
        one = numpy.ones(value_size, numpy.float32)
        described = Attention(
            query_heads=heads,
            kv_heads=shape.kv_heads,
            head_size=size,
            value_size=value_size,
            scaling=parameters.scaling,
            softcap=parameters.softcap,
            qkv=qkv,
            heads=offsets,
            query_norm=norms[0],
            key_norm=norms[1],
            rope=self._rope(number, size),
            out=out,
            norms_all_heads=any(norm.weight is not None and norm.weight.size > size for norm in norms),
            norms_after_rope=parameters.norms_after_rope,
            sink_logits=weights.vector("attn_sinks", number),
            temperature=self._temperature(number),
            gate=gate,
            value_norm=Norm(NormKind.RMS, one, None, parameters.epsilon) if family.normed_values else Norm(),
            output_norm=self._norm("attn_sub_norm", number, needed=False),
            clip=parameters.clip,
            value_scale=parameters.value_scale,
        )
        self._attentions[number] = described
        return described

    def _latent(self, number: int, sizes: LatentSizes) -> Attention:
        """The attention of layer `number`, with latent keys and values of these sizes."""
        parameters, weights = self._parameters, self._weights
        hidden, heads, latent = parameters.hidden_size, parameters.query_heads, parameters.latent_queries
        rows, query_up = heads * sizes.head_size, None
        if latent:
            matrix = weights.matrix("attn_q_b", number, rows, latent)
            query_up = Latent(matrix, self._norm("attn_q_a_norm", number), 0, 0)
        rest, rope = numpy.arange(sizes.nope_size, dtype=numpy.int32), self._parameters.ropes[number]
        tail, elements = numpy.arange(sizes.nope_size, sizes.head_size, dtype=numpy.int32), None
        pairs = tail.reshape(-1, 2).T.ravel()
        reorders, experts = self._architecture.reorders_pairs, parameters.experts
        if reorders is None:  # as transformers' class with such experts
            reorders = experts is not None and experts.scoring == Scoring.SIGMOID
        if reorders:
            elements = numpy.concatenate((rest, pairs))
        elif self._architecture.adjacent:
            tail = pairs
        return latent_attention(
            sizes,
            weights.matrix("attn_q_a", number, latent, hidden)
            if latent
            else weights.matrix("attn_q", number, rows, hidden),
            query_up,
            weights.matrix("attn_kv_a_mqa", number, sizes.rank + sizes.rope_size, hidden),
            weights.matrix("attn_kv_b", number, heads * (sizes.nope_size + sizes.value_size), sizes.rank),
            self._norm("attn_kv_a_norm", number),
            weights.matrix("attn_output", number, hidden, heads * sizes.value_size),
            parameters.scaling,
            Rope(rope.frequencies, rope.scale, rope.fixed, numpy.concatenate((tail, rest))) if rope else None,
            elements,
            f"the attention of layer {number}",
        )

    def _temperature(self, number: int) -> Temperature | None:
        """The factors on queries: by position, or by token index in layers without positions."""
        temperature, by_index = self._parameters.temperature, self._architecture.heats_unrotated
        if not temperature or (by_index and self._parameters.ropes[number]):
            return None
        return Temperature(temperature[0], float(temperature[1]), int(by_index), of_positions=not by_index)

    def _rope(self, number: int, size: int) -> Rope | None:
        rope = self._parameters.ropes[number]
        if rope is None:
            return None
        order: NDArray[numpy.int32] | None = None
        if self._architecture.adjacent:
            pairs, rest = numpy.split(numpy.arange(size, dtype=numpy.int32), [2 * len(rope.frequencies)])
            order = numpy.concatenate((pairs.reshape(-1, 2).T.ravel(), rest))
        elif self._architecture.swaps_halves:
            order = numpy.roll(numpy.arange(size, dtype=numpy.int32), size // 2)
        return Rope(rope.frequencies, rope.scale, rope.fixed, order)
