"""Describes a model from a file, as `native.describe` does from a transformers model."""

from __future__ import annotations

from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream.native.abi import GateKind, MatrixKind, Scoring
from h2o_stream.native.attention import Attention, Gate, HeadOffsets, Latent, Rope, Temperature
from h2o_stream.native.description import (
    Description,
    DescriptionError,
    Layer,
    Matrix,
    Mlp,
    Norm,
)
from h2o_stream.native.experts import Experts, Router
from h2o_stream.native.latent import LatentSizes, latent_attention
from h2o_stream.native.layouts import NORM_ROLES
from h2o_stream.runtime.architectures import EMBEDDING, OUTPUT, Architecture
from h2o_stream.runtime.file_numbers import rounded
from h2o_stream.runtime.mixers import describe_mixer, has_mixer
from h2o_stream.runtime.parameters import ExpertParameters, Parameters
from h2o_stream.runtime.weights import Weights


def describe_file(architecture: Architecture, parameters: Parameters, weights: Weights, dtype: str) -> Description:
    """Describe a model from its parameters and weights.

    Args:
        architecture: of its family.
        parameters: of the file.
        weights: of the file.
        dtype: of keys and values, ``float32`` or ``bfloat16``.

    Raises:
        DescriptionError: weights are missing, or not packed.
    """
    return _FileReader(architecture, parameters, weights, dtype).read()


class _FileReader:
    def __init__(self, architecture: Architecture, parameters: Parameters, weights: Weights, dtype: str) -> None:
        self._architecture, self._parameters, self._weights, self._dtype = architecture, parameters, weights, dtype

    def read(self) -> Description:
        parameters, weights = self._parameters, self._weights
        shape = parameters.vocabulary, parameters.hidden_size
        embedding = weights.matrix(EMBEDDING, None, *shape)
        dense = embedding.kind in (MatrixKind.FLOAT32, MatrixKind.BFLOAT16)
        scale = parameters.embedding_scale
        if dense:  # transformers has the factor in the dtype of the embedding
            scale = float(rounded(numpy.array([scale], numpy.float32), self._dtype)[0])
        return Description(
            layers=[self._layer(number) for number in range(parameters.num_layers)],
            embedding=embedding,
            embedding_scale=scale,
            learned_positions=None,
            learned_offset=0,
            norm=self._norm(self._architecture.final_norm, None),
            output=embedding if parameters.tied else weights.matrix(OUTPUT, None, *shape),
            logit_scale=parameters.logit_scale,
            logit_softcap=parameters.logit_softcap,
            residual_scale=parameters.residual_scale,
            dtype=self._dtype,
            logits_dtype=self._dtype if dense else "float32",
        )

    def _norm(self, name: str, layer: int | None, needed: bool = True) -> Norm:
        weight = self._weights.vector(name, layer)
        if weight is None:
            if needed:
                raise DescriptionError(f"it has no {name}")
            return Norm()
        bias = self._weights.vector(name, layer, "bias")
        return Norm(self._parameters.norm, weight, bias, self._parameters.epsilon)

    def _layer(self, number: int) -> Layer:
        weights, experts, latent = self._weights, self._parameters.experts, self._parameters.latent
        attends, mixes = weights.has("attn_output", number), has_mixer(weights, number)
        mlp: Mlp | Experts | None = None
        if experts and weights.has("ffn_gate_inp", number):
            mlp = self._experts(number, experts)
        elif weights.has("ffn_down", number):
            mlp = self._mlp(number, self._parameters.inner_size)
        attention = None
        if attends:
            attention = self._latent(number, latent) if latent else self._attention(number)
        names = self._architecture.norms
        if self._architecture.one_part:
            names = {"before_attention" if attends or mixes else "before_mlp": names["before_attention"]}
        norms = {role: self._norm(name, number) for role, name in names.items()}
        by_role: dict[str, Any] = {role: norms.get(role, Norm()) for role in NORM_ROLES}
        return Layer(
            attention=attention,
            mixer=describe_mixer(self._architecture, self._parameters, weights, number) if mixes else None,
            mlp=mlp,
            **by_role,
            parallel=self._architecture.parallel,
        )

    def _mlp(self, number: int, inner: int, kind: str = "") -> Mlp:
        """The MLP of a layer, or with `kind` ``_shexp`` the expert for all tokens."""
        weights, hidden = self._weights, self._parameters.hidden_size
        gate: Matrix | None = None
        if self._architecture.fused_mlp:
            fused = weights.matrix("ffn_up", number, 2 * inner, hidden)
            gate, up = fused.row_range(0, inner), fused.row_range(inner, inner)
        else:
            up = weights.matrix(f"ffn_up{kind}", number, inner, hidden)
            if weights.has(f"ffn_gate{kind}", number):
                gate = weights.matrix(f"ffn_gate{kind}", number, inner, hidden)
        down, family = weights.matrix(f"ffn_down{kind}", number, hidden, inner), self._architecture
        return Mlp(gate, up, down, family.activation, family.activation_parameters)

    def _experts(self, number: int, experts: ExpertParameters) -> Experts:
        weights, hidden, inner = self._weights, self._parameters.hidden_size, experts.inner_size
        gated = weights.has("ffn_gate_inp_shexp", number)
        return Experts(
            router=Router(
                matrix=self._dense("ffn_gate_inp", number, experts.count),
                chosen=experts.chosen,
                scoring=experts.scoring,
                normalized=experts.normalized,
                scale=experts.scale,
                choice_bias=weights.vector("exp_probs_b", number, "bias"),
                groups=experts.groups,
                chosen_groups=experts.chosen_groups,
                group_worth=experts.group_worth,
            ),
            gate=weights.matrix("ffn_gate_exps", number, experts.count * inner, hidden),
            up=weights.matrix("ffn_up_exps", number, experts.count * inner, hidden),
            down=weights.matrix("ffn_down_exps", number, experts.count * hidden, inner),
            inner_size=inner,
            stride=inner,
            activation=self._architecture.activation,
            parameters=self._architecture.activation_parameters,
            shared=self._mlp(number, experts.shared_size, "_shexp") if experts.shared_size else None,
            shared_gate=self._dense("ffn_gate_inp_shexp", number, 1) if gated else None,
        )

    def _dense(self, name: str, number: int, rows: int) -> Matrix:
        """A small matrix [rows, hidden] that is not packed, in the dtype of the model."""
        numbers, hidden = self._weights.vector(name, number), self._parameters.hidden_size
        if numbers is None or numbers.size != rows * hidden:
            raise DescriptionError(f"{name} of layer {number} is not {rows} rows of {hidden}")
        numbers, bias = numbers.reshape(rows, hidden), self._weights.vector(name, number, "bias")
        if self._dtype == "float32":
            return Matrix(numbers, bias, rows, hidden, MatrixKind.FLOAT32)
        return Matrix((numbers.view(numpy.uint32) >> 16).astype(numpy.uint16), bias, rows, hidden, MatrixKind.BFLOAT16)

    def _attention(self, number: int) -> Attention:
        parameters, weights, size = self._parameters, self._weights, self._parameters.head_size
        query_rows, kv_rows = parameters.query_heads * size, parameters.kv_heads * size
        gated = 2 if self._architecture.gates_attention else 1
        rows = {"attn_q": gated * query_rows, "attn_k": kv_rows, "attn_v": kv_rows}
        if weights.has("attn_qkv", number):
            rows = {"attn_qkv": query_rows + 2 * kv_rows}
        norms = [self._norm(name, number, needed=False) for name in ("attn_q_norm", "attn_k_norm")]
        return Attention(
            query_heads=parameters.query_heads,
            kv_heads=parameters.kv_heads,
            head_size=size,
            value_size=size,
            scaling=parameters.scaling,
            softcap=parameters.softcap,
            qkv=[weights.matrix(name, number, count, parameters.hidden_size) for name, count in rows.items()],
            heads=HeadOffsets(0, gated * size, gated * query_rows, size, gated * query_rows + kv_rows, size),
            query_norm=norms[0],
            key_norm=norms[1],
            rope=self._rope(number),
            out=weights.matrix("attn_output", number, parameters.hidden_size, query_rows),
            norms_all_heads=any(norm.weight is not None and norm.weight.size > size for norm in norms),
            norms_after_rope=parameters.norms_after_rope,
            sink_logits=weights.vector("attn_sinks", number),
            temperature=self._temperature,
            gate=Gate(GateKind.SIGMOID_GATE, size, 2 * size, size) if self._architecture.gates_attention else None,
        )

    def _latent(self, number: int, sizes: LatentSizes) -> Attention:
        """Of layer `number`, with latent keys and values of these sizes."""
        parameters, weights = self._parameters, self._weights
        hidden, heads, latent = parameters.hidden_size, parameters.query_heads, parameters.latent_queries
        rows, query_up = heads * sizes.head_size, None
        if latent:
            matrix = weights.matrix("attn_q_b", number, rows, latent)
            query_up = Latent(matrix, self._norm("attn_q_a_norm", number), 0, 0)
        rest, rope = numpy.arange(sizes.rest, dtype=numpy.int32), self._parameters.ropes[number]
        tail, elements = numpy.arange(sizes.rest, sizes.head_size, dtype=numpy.int32), None
        pairs = tail.reshape(-1, 2).T.ravel()
        if parameters.experts and parameters.experts.scoring == Scoring.SIGMOID:  # transformers' class takes halves
            elements = numpy.concatenate((rest, pairs))
        else:
            tail = pairs
        return latent_attention(
            sizes,
            weights.matrix("attn_q_a", number, latent, hidden)
            if latent
            else weights.matrix("attn_q", number, rows, hidden),
            query_up,
            weights.matrix("attn_kv_a_mqa", number, sizes.rank + sizes.rotated, hidden),
            weights.matrix("attn_kv_b", number, heads * (sizes.rest + sizes.value_size), sizes.rank),
            self._norm("attn_kv_a_norm", number),
            weights.matrix("attn_output", number, hidden, heads * sizes.value_size),
            parameters.scaling,
            Rope(rope.frequencies, rope.scale, rope.fixed, numpy.concatenate((tail, rest))) if rope else None,
            elements,
            f"the attention of layer {number}",
        )

    @property
    def _temperature(self) -> Temperature | None:
        found = self._parameters.temperature
        return Temperature(found[0], float(found[1]), 0, of_positions=True) if found else None

    def _rope(self, number: int) -> Rope | None:
        rope, size = self._parameters.ropes[number], self._parameters.head_size
        if rope is None:
            return None
        order: NDArray[numpy.int32] | None = None
        if self._architecture.adjacent:
            pairs, rest = numpy.split(numpy.arange(size, dtype=numpy.int32), [2 * len(rope.frequencies)])
            order = numpy.concatenate((pairs.reshape(-1, 2).T.ravel(), rest))
        return Rope(rope.frequencies, rope.scale, rope.fixed, order)
