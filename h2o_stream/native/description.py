"""A decoder-only transformer as data: its matrices, norms and parameters, in the terms of `src/abi.h`.

A description is independent of any cache. `describe` creates one from a transformers model; `NativeModel` converts it
to C structures. Its arrays may be tensors of torch or arrays of numpy; nothing here imports torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

from h2o_stream.native import abi
from h2o_stream.native.abi import Activation, Array, pointer
from h2o_stream.native.matrix import DescriptionError, Matrix, Norm
from h2o_stream.native.mixers import Mixer, fill_mixer

__all__ = [
    "Attention",
    "Description",
    "DescriptionError",
    "HeadOffsets",
    "Layer",
    "Matrix",
    "Mlp",
    "NativeModel",
    "Norm",
]


@dataclass(frozen=True)
class HeadOffsets:
    """Where queries, keys and values are in the output of `qkv`: head h starts at offset + h * stride."""

    query_offset: int
    query_stride: int
    key_offset: int
    key_stride: int
    value_offset: int
    value_stride: int


@dataclass(frozen=True)
class OutputGate:
    """Where the gates of heads are in the output of `qkv`: those of head h start at offset + h * stride."""

    offset: int
    stride: int


@dataclass(frozen=True, eq=False)
class Rope:
    """The rotary embedding of a layer, in the rotate-half form.

    Attributes:
        frequencies: [rotary_dims / 2] float32, angles per position.
        scale: factor on rotated queries and keys (YaRN, LongRoPE), at every position.
        fixed: whether nothing but the angles depends on positions, and the frequencies not on the sequence length.
        order: [head_size] int32, the order of the elements of a head in which halves are rotated, see
            `cache.rope.dimension_orders`; None for as they are.
    """

    frequencies: Array
    scale: float
    fixed: bool
    order: Array | None = None

    @property
    def rotary_dims(self) -> int:
        """Number of rotated elements of each head, the first ones in `order`."""
        return 2 * len(self.frequencies)


@dataclass(frozen=True, eq=False)
class Attention:
    """The attention of a layer; the outputs of one to three `qkv` matrices are concatenated.

    Attributes:
        norms_all_heads: whether the norms are of all heads as one vector.
        norms_after_rope: whether they come after RoPE.
        sink_logits: [query_heads] float32, a logit of each head that stands for no token (learned sinks), or None.
        gate: of the heads' outputs, whose factors are its sigmoids; or None.
    """

    query_heads: int
    kv_heads: int
    head_size: int
    value_size: int
    scaling: float
    softcap: float
    qkv: Sequence[Matrix]
    heads: HeadOffsets
    query_norm: Norm
    key_norm: Norm
    rope: Rope | None
    out: Matrix
    norms_all_heads: bool = False
    norms_after_rope: bool = False
    sink_logits: Array | None = None
    gate: OutputGate | None = None

    def fill(self, struct: abi.Layer) -> None:
        """Fill the structure of a layer, except for the fields that depend on a cache."""
        for name in ("query_heads", "kv_heads", "head_size", "value_size", "scaling", "softcap"):
            setattr(struct.attention, name, getattr(self, name))
        normed = (self.query_heads, self.kv_heads) if self.norms_all_heads else (1, 1)
        struct.query_norm = self.query_norm.to_struct(normed[0] * self.head_size)
        struct.key_norm = self.key_norm.to_struct(normed[1] * self.head_size)
        struct.norms_all_heads, struct.norms_after_rope = self.norms_all_heads, self.norms_after_rope
        struct.attention.sink_logits = pointer(self.sink_logits, "float32", self.query_heads)
        for index, matrix in enumerate(self.qkv):
            struct.qkv[index] = matrix.to_struct()
        struct.qkv_count, struct.out = len(self.qkv), self.out.to_struct()
        for offset in fields(self.heads):
            setattr(struct, offset.name, getattr(self.heads, offset.name))
        if self.gate:
            struct.gate_offset, struct.gate_stride = self.gate.offset, self.gate.stride
        if rope := self.rope:
            struct.frequencies = pointer(rope.frequencies, "float32", rope.rotary_dims // 2)
            struct.absolute_rotary_dims = rope.rotary_dims
            struct.order = pointer(rope.order, "int32", self.head_size)
            struct.rope_scale, struct.rope_scaled_dims = rope.scale, rope.rotary_dims if rope.scale != 1 else 0


class FeedForward(Protocol):
    """What follows attention and mixer in a layer: an `Mlp` or `experts.Experts`."""

    @property
    def matrices(self) -> list[Matrix]:
        """All matrices of some size."""

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a decode step reads."""

    def fill(self, struct: abi.Layer) -> None:
        """Fill the structure of a layer."""


@dataclass(frozen=True, eq=False)
class Mlp:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate."""

    gate: Matrix | None
    up: Matrix
    down: Matrix
    activation: Activation

    @property
    def matrices(self) -> list[Matrix]:
        """See `FeedForward`."""
        return [*([self.gate] if self.gate else []), self.up, self.down]

    @property
    def nbytes(self) -> int:
        """See `FeedForward`."""
        return sum(matrix.weights.nbytes for matrix in self.matrices)

    def fill(self, struct: abi.Layer) -> None:
        """See `FeedForward`."""
        struct.up, struct.down, struct.activation = self.up.to_struct(), self.down.to_struct(), self.activation
        if self.gate:
            struct.gate = self.gate.to_struct()


@dataclass(frozen=True, eq=False)
class Layer:
    """A decoder layer: attention or a recurrent mixer, or both, whose outputs are added; then an MLP.

    Any of them may be missing. With `parallel` the MLP reads the attention's input.

    Raises:
        DescriptionError: nothing is left.
    """

    attention: Attention | None
    mlp: FeedForward | None
    before_attention: Norm
    after_attention: Norm
    before_mlp: Norm
    after_mlp: Norm
    parallel: bool
    mixer: Mixer | None = None

    def __post_init__(self) -> None:
        if self.attention is None and self.mixer is None and self.mlp is None:
            raise DescriptionError("a layer computes nothing")

    @property
    def matrices(self) -> list[Matrix]:
        """See `Description.matrices`."""
        return [*self._mixing_matrices, *(self.mlp.matrices if self.mlp else [])]

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a decode step reads."""
        mixing: int = sum(matrix.weights.nbytes for matrix in self._mixing_matrices)
        return mixing + (self.mlp.nbytes if self.mlp else 0)

    @property
    def _mixing_matrices(self) -> list[Matrix]:
        attention = [*self.attention.qkv, self.attention.out] if self.attention else []
        return attention + ([*self.mixer.projections, self.mixer.out] if self.mixer else [])

    def fill(self, struct: abi.Layer, hidden: int, first_state: int) -> None:
        """Fill a structure, except for the fields that depend on a cache.

        Args:
            struct: is filled.
            hidden: size of the residual stream.
            first_state: number of states of mixers in all layers before.
        """
        for name in ("before_attention", "after_attention", "before_mlp", "after_mlp"):
            setattr(struct, name, getattr(self, name).to_struct(hidden))
        struct.parallel, struct.rope_scale = self.parallel, 1.0
        if self.attention:
            self.attention.fill(struct)
        if self.mixer:
            fill_mixer(self.mixer, struct.mixer, first_state)
        if self.mlp:
            self.mlp.fill(struct)


@dataclass(frozen=True, eq=False)
class Description:
    """A causal language model.

    Attributes:
        layers: decoder layers.
        embedding: [vocabulary, hidden].
        embedding_scale: factor on embeddings.
        learned_positions: [n, hidden] float32, or None.
        learned_offset: row for token index 0.
        embedding_norm: norm of what goes into the first layer.
        norm: final norm.
        output: output layer.
        logit_scale: factor on logits.
        logit_softcap: softcap of logits, 0 for none.
        residual_scale: factor on attention and MLP outputs.
        dtype: of the model's activations, such as "bfloat16"; those of a step are float32.
        logits_dtype: of the model's logits.
    """

    layers: Sequence[Layer]
    embedding: Matrix
    embedding_scale: float
    learned_positions: Array | None
    learned_offset: int
    norm: Norm
    output: Matrix
    logit_scale: float
    logit_softcap: float
    residual_scale: float
    dtype: str
    logits_dtype: str
    embedding_norm: Norm = field(default_factory=Norm)

    @property
    def supports_absolute(self) -> bool:
        """Whether ``absolute`` positions work: nothing but angles depends on positions."""
        ropes = (layer.attention.rope for layer in self.layers if layer.attention)
        return all(rope is None or rope.fixed for rope in ropes)

    @property
    def matrices(self) -> list[Matrix]:
        """All matrices that a decode step multiplies, or of which it multiplies some experts; without routers."""
        return [self.output, *(matrix for layer in self.layers for matrix in layer.matrices)]

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a decode step reads."""
        return sum((layer.nbytes for layer in self.layers), int(self.output.weights.nbytes))


class NativeModel:
    """A description as C structures, with the arrays they point to.

    The fields that depend on a cache are still zero: those of `AttentionLayer` from `policy` on, and the slot groups.

    Attributes:
        layers: array of `abi.Layer`.
        struct: the model; points to `layers`.
        description: keeps the arrays alive.
    """

    def __init__(self, description: Description) -> None:
        self.description = description
        self.layers = (abi.Layer * len(description.layers))()
        states = 0
        for layer, struct in zip(description.layers, self.layers, strict=True):
            layer.fill(struct, description.embedding.columns, states)
            states += len(layer.mixer.states) if layer.mixer else 0
        self.struct = abi.Model(
            layers=ctypes.cast(self.layers, ctypes.POINTER(abi.Layer)),
            layer_count=len(self.layers),
            hidden_size=description.embedding.columns,
            vocab_size=description.embedding.rows,
            embedding=description.embedding.to_struct(),
            embedding_scale=description.embedding_scale,
            learned_positions=pointer(description.learned_positions, "float32", description.embedding.columns),
            learned_offset=description.learned_offset,
            embedding_norm=description.embedding_norm.to_struct(description.embedding.columns),
            norm=description.norm.to_struct(description.embedding.columns),
            output=description.output.to_struct(),
            logit_scale=description.logit_scale,
            logit_softcap=description.logit_softcap,
            residual_scale=description.residual_scale,
        )
