"""A decoder-only transformer as data: its matrices, norms and parameters, in the terms of `src/abi.h`.

A description is independent of any cache. `describe` creates one from a transformers model; `NativeModel` converts it
to C structures. Its arrays may be tensors of torch or arrays of numpy; nothing here imports torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from h2o_stream.native import abi, packing
from h2o_stream.native.abi import Activation, Array, MatrixKind, NormKind, pointer


class DescriptionError(Exception):
    """The model cannot be described; the message gives the reason in one line."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """Weights of a linear layer or an embedding.

    Attributes:
        weights: [rows, columns] float32 or bfloat16, or uint8 of `packing.tiles_shape`; shared with the model.
        bias: [rows] float32, or None.
        rows: output features.
        columns: input features.
        kind: storage format.
    """

    weights: Array
    bias: Array | None
    rows: int
    columns: int
    kind: MatrixKind

    def row_range(self, first: int, count: int) -> Matrix:
        """Rows [first, first + count) in the same memory.

        Raises:
            DescriptionError: the rows of a packed matrix do not start at a tile.
        """
        tile = 1 if self.kind in (MatrixKind.FLOAT32, MatrixKind.BFLOAT16) else packing.ROWS
        if first % tile:
            raise DescriptionError(f"rows {first} of a packed matrix do not start at a multiple of {tile}")
        weights = self.weights[first // tile : -(-(first + count) // tile)]
        bias = None if self.bias is None else self.bias[first : first + count]
        return Matrix(weights, bias, count, self.columns, self.kind)

    def to_struct(self) -> abi.Matrix:
        """As a C structure."""
        dense = {MatrixKind.FLOAT32: "float32", MatrixKind.BFLOAT16: "bfloat16"}.get(self.kind)
        size = self.rows * self.columns if dense else packing.packed_bytes(self.kind, self.rows, self.columns)
        weights = pointer(self.weights, dense or "uint8", size)
        return abi.Matrix(weights, pointer(self.bias, "float32", self.rows), self.rows, self.columns, self.kind)


@dataclass(frozen=True, eq=False)
class Norm:
    """A normalization; offsets such as Gemma's 1 + w are folded into the weight.

    Attributes:
        kind: RMS or layer norm, or none.
        weight: [n] float32, or None without a norm.
        bias: [n] float32, or None.
        epsilon: added to the mean square or variance.
    """

    kind: NormKind = NormKind.NONE
    weight: Array | None = None
    bias: Array | None = None
    epsilon: float = 0.0

    def to_struct(self, size: int) -> abi.Norm:
        """As a C structure, of a norm whose weights are `size` numbers."""
        weight, bias = (pointer(x, "float32", size) for x in (self.weight, self.bias))
        return abi.Norm(weight, bias, self.epsilon, self.kind)


@dataclass(frozen=True)
class HeadOffsets:
    """Where queries, keys and values are in the output of `qkv`: head h starts at offset + h * stride."""

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


class FeedForward(Protocol):
    """What follows the attention in a layer: an `Mlp` or `experts.Experts`."""

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
    """A decoder layer; with `parallel` the MLP reads the attention's input."""

    attention: Attention
    mlp: FeedForward
    before_attention: Norm
    after_attention: Norm
    before_mlp: Norm
    after_mlp: Norm
    parallel: bool

    @property
    def matrices(self) -> list[Matrix]:
        """See `Description.matrices`."""
        return [*self.attention.qkv, self.attention.out, *self.mlp.matrices]

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a decode step reads."""
        attention: int = sum(matrix.weights.nbytes for matrix in (*self.attention.qkv, self.attention.out))
        return attention + self.mlp.nbytes

    def fill(self, struct: abi.Layer) -> None:
        """Fill a structure, except for the fields that depend on a cache."""
        attention = self.attention
        for name in ("query_heads", "kv_heads", "head_size", "value_size", "scaling", "softcap"):
            setattr(struct.attention, name, getattr(attention, name))
        for name in ("before_attention", "after_attention", "before_mlp", "after_mlp"):
            setattr(struct, name, getattr(self, name).to_struct(attention.out.rows))
        normed = (attention.query_heads, attention.kv_heads) if attention.norms_all_heads else (1, 1)
        struct.query_norm = attention.query_norm.to_struct(normed[0] * attention.head_size)
        struct.key_norm = attention.key_norm.to_struct(normed[1] * attention.head_size)
        struct.norms_all_heads, struct.norms_after_rope = attention.norms_all_heads, attention.norms_after_rope
        struct.attention.sink_logits = pointer(attention.sink_logits, "float32", attention.query_heads)
        for index, matrix in enumerate(attention.qkv):
            struct.qkv[index] = matrix.to_struct()
        struct.qkv_count = len(attention.qkv)
        for field in fields(attention.heads):
            setattr(struct, field.name, getattr(attention.heads, field.name))
        struct.rope_scale = 1.0
        if attention.rope:
            rope = attention.rope
            struct.frequencies = pointer(rope.frequencies, "float32", rope.rotary_dims // 2)
            struct.absolute_rotary_dims = rope.rotary_dims
            struct.order = pointer(rope.order, "int32", attention.head_size)
            struct.rope_scale, struct.rope_scaled_dims = rope.scale, rope.rotary_dims if rope.scale != 1 else 0
        struct.out, struct.parallel = attention.out.to_struct(), self.parallel
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
    embedding_norm: Norm = Norm()

    @property
    def supports_absolute(self) -> bool:
        """Whether ``absolute`` positions work: nothing but angles depends on positions."""
        return all(layer.attention.rope is None or layer.attention.rope.fixed for layer in self.layers)

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
        for layer, struct in zip(description.layers, self.layers, strict=True):
            layer.fill(struct)
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
