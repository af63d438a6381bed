"""A decoder-only transformer as data: which matrices and norms it has, and what is done with them.

Everything that the native step (`src/abi.h`, whose names these are) must know about a model and nothing about a cache.
`describe` makes one of a transformers model; `NativeModel` holds it as structures of the C interface.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields

from torch import Tensor

from h2o_stream.native import abi, packing
from h2o_stream.native.abi import Activation, MatrixKind, NormKind, pointer


class DescriptionError(Exception):
    """This model is not one that can be described; the message is one line that names the reason."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """Weights of a linear layer or an embedding.

    Attributes:
        weights: [rows, columns] float32 or bfloat16, or uint8 of `packing.tiles_shape`; the model's own.
        bias: [rows] float32, or None.
        rows: numbers that come out.
        columns: numbers that go in.
        kind: how the numbers are held.
    """

    weights: Tensor
    bias: Tensor | None
    rows: int
    columns: int
    kind: MatrixKind

    def row_range(self, first: int, count: int) -> Matrix:
        """Some of the rows, in the same memory.

        Raises:
            DescriptionError: they do not start at a tile of the packed matrix.
        """
        tile = 1 if self.kind in (MatrixKind.FLOAT32, MatrixKind.BFLOAT16) else packing.ROWS
        if first % tile:
            raise DescriptionError(f"rows {first} and on of a packed matrix do not start at a multiple of {tile}")
        weights = self.weights[first // tile : -(-(first + count) // tile)]
        bias = None if self.bias is None else self.bias[first : first + count]
        return Matrix(weights, bias, count, self.columns, self.kind)

    def to_struct(self) -> abi.Matrix:
        """Addresses of this."""
        return abi.Matrix(pointer(self.weights), pointer(self.bias), self.rows, self.columns, self.kind)


@dataclass(frozen=True, eq=False)
class Norm:
    """A normalization; offsets such as Gemma's 1 + w are part of the weight.

    Attributes:
        kind: RMS or layer normalization, or none at all.
        weight: [n] float32, or None with no norm.
        bias: [n] float32, or None.
        epsilon: added to the mean square, or to the variance.
    """

    kind: NormKind = NormKind.NONE
    weight: Tensor | None = None
    bias: Tensor | None = None
    epsilon: float = 0.0

    def to_struct(self) -> abi.Norm:
        """Addresses of this."""
        return abi.Norm(pointer(self.weight), pointer(self.bias), self.epsilon, self.kind)


@dataclass(frozen=True)
class HeadOffsets:
    """Where queries, keys and values lie in the vector that `Layer.qkv` gives: head h at offset + h * stride."""

    query_offset: int
    query_stride: int
    key_offset: int
    key_stride: int
    value_offset: int
    value_stride: int


@dataclass(frozen=True, eq=False)
class Rope:
    """The rotary embedding of a layer, in the rotate-half form.

    Attributes:
        frequencies: float32 [rotary / 2], angles per position.
        scale: factor on the rotated numbers of queries and keys (YaRN, LongRoPE), at every position.
        fixed: the frequencies are the same at every length; otherwise they hold for short texts only.
    """

    frequencies: Tensor
    scale: float
    fixed: bool

    @property
    def rotary(self) -> int:
        """Numbers of a head that are rotated, from its first."""
        return 2 * len(self.frequencies)


@dataclass(frozen=True, eq=False)
class Attention:
    """The attention of a layer; `qkv` are multiplied to one vector, one to three matrices one after the other."""

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


@dataclass(frozen=True, eq=False)
class Mlp:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate."""

    gate: Matrix | None
    up: Matrix
    down: Matrix
    activation: Activation


@dataclass(frozen=True, eq=False)
class Layer:
    """A decoder layer; with `parallel` the MLP reads what the attention read."""

    attention: Attention
    mlp: Mlp
    before_attention: Norm
    after_attention: Norm
    before_mlp: Norm
    after_mlp: Norm
    parallel: bool

    def fill(self, struct: abi.Layer) -> None:
        """Write this into a structure; what depends on a cache is left alone."""
        attention, mlp = self.attention, self.mlp
        for name in ("query_heads", "kv_heads", "head_size", "value_size", "scaling", "softcap"):
            setattr(struct.attention, name, getattr(attention, name))
        for name in ("before_attention", "after_attention", "before_mlp", "after_mlp"):
            setattr(struct, name, getattr(self, name).to_struct())
        struct.query_norm, struct.key_norm = attention.query_norm.to_struct(), attention.key_norm.to_struct()
        for number, matrix in enumerate(attention.qkv):
            struct.qkv[number] = matrix.to_struct()
        struct.qkv_count = len(attention.qkv)
        for field in fields(attention.heads):
            setattr(struct, field.name, getattr(attention.heads, field.name))
        struct.rope_scale = 1.0
        if attention.rope:
            rope = attention.rope
            struct.frequencies, struct.absolute_rotary_dims = pointer(rope.frequencies), rope.rotary
            struct.rope_scale, struct.rope_scaled_dims = rope.scale, rope.rotary if rope.scale != 1 else 0
        struct.out, struct.up, struct.down = attention.out.to_struct(), mlp.up.to_struct(), mlp.down.to_struct()
        if mlp.gate:
            struct.gate = mlp.gate.to_struct()
        struct.activation, struct.parallel = mlp.activation, self.parallel


@dataclass(frozen=True, eq=False)
class Description:
    """A causal language model.

    Attributes:
        layers: one after the other.
        embedding: a row of `hidden` numbers for each token of the vocabulary.
        embedding_scale: factor on its rows.
        learned_positions: [n, hidden] float32, or None.
        learned_offset: its row for token index 0.
        norm: in front of the output layer.
        output: the output layer.
        logit_scale: factor on logits.
        logit_softcap: of logits, 0 for none.
        residual_scale: factor on what attention and MLP add.
    """

    layers: Sequence[Layer]
    embedding: Matrix
    embedding_scale: float
    learned_positions: Tensor | None
    learned_offset: int
    norm: Norm
    output: Matrix
    logit_scale: float
    logit_softcap: float
    residual_scale: float

    @property
    def supports_absolute(self) -> bool:
        """Whether the frequencies of all layers hold at every position, as ``absolute`` positions need."""
        return all(layer.attention.rope is None or layer.attention.rope.fixed for layer in self.layers)

    @property
    def matrices(self) -> list[Matrix]:
        """All that a token is multiplied by."""
        found = [self.output]
        for layer in self.layers:
            attention, mlp = layer.attention, layer.mlp
            found += [*attention.qkv, attention.out, *([mlp.gate] if mlp.gate else []), mlp.up, mlp.down]
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a token reads."""
        return sum(matrix.weights.nbytes for matrix in self.matrices)


class NativeModel:
    """A description as structures of the C interface, and what keeps its tensors alive.

    Of every layer the cache's part is still zero: `policy` and on of `AttentionLayer`, and the groups of slots.

    Attributes:
        layers: array of `abi.Layer`, to be filled further.
        struct: the model; it points to `layers`.
        description: owns the tensors.
    """

    def __init__(self, description: Description) -> None:
        self.description = description
        self.layers = (abi.Layer * len(description.layers))()
        for layer, struct in zip(description.layers, self.layers, strict=True):
            layer.fill(struct)
        self.struct = abi.Model(
            layers=ctypes.cast(self.layers, ctypes.POINTER(abi.Layer)),
            layer_count=len(self.layers),
            hidden_size=description.embedding.columns,
            vocab_size=description.embedding.rows,
            embedding=description.embedding.to_struct(),
            embedding_scale=description.embedding_scale,
            learned_positions=pointer(description.learned_positions),
            learned_offset=description.learned_offset,
            norm=description.norm.to_struct(),
            output=description.output.to_struct(),
            logit_scale=description.logit_scale,
            logit_softcap=description.logit_softcap,
            residual_scale=description.residual_scale,
        )
