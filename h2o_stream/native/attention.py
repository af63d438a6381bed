"""The attention of a layer, as part of a model's description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

from h2o_stream.native import abi
from h2o_stream.native.abi import GateKind
from h2o_stream.native.matrix import NO_NORM, DescriptionError, Matrix, Norm, check_count, require
from h2o_stream.native.pointers import Array, pointer

_MAX_QKV, _MAX_LATENT = 4, 2
"""Matrices that an attention can have, see `abi.h`."""


@dataclass(frozen=True)
class HeadOffsets:
    """Where queries, keys and values are in the vector of `Attention.qkv`: head h starts at offset + h * stride."""

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
        fixed: whether rotations depend on the position alone, not on the length of the text.
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
class Latent:
    """Takes a part of the vector of `Attention.qkv`, from element `start` on, through a norm and a matrix.

    The result is written from element `end` on.
    """

    matrix: Matrix
    norm: Norm
    start: int
    end: int


@dataclass(frozen=True)
class Tail:
    """The last `size` elements of all keys: those of the vector of `Attention.qkv` from `offset` on."""

    offset: int
    size: int


@dataclass(frozen=True)
class Gate:
    """Factors on an attention's output, in the vector of `Attention.qkv`: of head h from offset + h * stride on.

    They go through the function `kind` before. Each head has `value_size` of them, or 1 for all of its output.
    """

    kind: GateKind
    offset: int
    stride: int
    size: int


@dataclass(frozen=True)
class Temperature:
    """Queries are multiplied by 1 + scale * log(1 + floor((token index + start) / length)).

    With `of_positions` it is the position, which is the token index with ``absolute`` positions and otherwise 0.
    """

    scale: float
    length: float
    start: int
    of_positions: bool = False


@dataclass(frozen=True, eq=False)
class Attention:
    """The attention of a layer; the outputs of one to four `qkv` matrices are parts of one vector.

    Attributes:
        columns: start of each matrix's output in that vector; None for one after another.
        norms_all_heads: whether the norms are of all heads as one vector.
        norms_after_rope: whether they come after RoPE.
        sink_logits: [query_heads] float32, a logit of each head that stands for no token (learned sinks), or None.
        latent: what is then computed from the vector: latent queries, keys and values.
        elements: [head_size] int32, where the elements of a query or key are in its part of the vector; None for as
            they are. Everything else is said of the elements in this order.
        key_tail: what all keys end with.
        value_norm: norm of each head's value.
        output_norm: norm of the output of all heads as one vector.
        source: the layer whose keys and values these are, which are in the same places of its vector; None for the
            layer itself.
        clip: largest magnitude in the vector; 0 for any.

    Raises:
        DescriptionError: sizes do not fit.
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
    columns: Sequence[int] | None = None
    latent: Sequence[Latent] = ()
    elements: Array | None = None
    key_tail: Tail | None = None
    gate: Gate | None = None
    value_norm: Norm = NO_NORM
    output_norm: Norm = NO_NORM
    source: int | None = None
    temperature: Temperature | None = None
    clip: float = 0.0
    value_scale: float = 1.0

    def __post_init__(self) -> None:
        size, width, heads = self.head_size, self.value_size, f"{self.query_heads} heads of {self.head_size}"
        whole = min(self.query_heads, self.kv_heads, size, width) > 0 and self.query_heads % self.kv_heads == 0
        require(whole, f"{heads} do not share {self.kv_heads} keys and values of {width}")
        parts = len(self.qkv), len(self.latent)
        require(0 < parts[0] <= _MAX_QKV and parts[1] <= _MAX_LATENT, f"{heads} are in {parts} parts")
        require(self.out.columns == self.query_heads * width, f"{heads} do not fit {self.out.columns} columns")
        if self.rope:
            turned = self.rope.rotary_dims
            limit = f"RoPE turns {turned} numbers (rope.dimension_count, partial_rotary_factor) of a head of {size}"
            require(0 < turned <= size, limit)
        for order in (self.elements, self.rope.order if self.rope else None):
            require(order is None or sorted(order.tolist()) == [*range(size)], f"{heads} are in a wrong order")
        normed = (self.query_heads, self.kv_heads) if self.norms_all_heads else (1, 1)
        self.query_norm.check_size(normed[0] * size, "the norm of queries")
        self.key_norm.check_size(normed[1] * size, "the norm of keys")
        self.value_norm.check_size(width, "the norm of values")
        self.output_norm.check_size(self.out.columns, "the norm of an attention's output")
        check_count(self.sink_logits, self.query_heads, "the learned sinks")
        self._check_places()

    def _check_places(self) -> None:
        """Check that everything that is read of the vector is in it."""
        end = max(start + matrix.rows for start, matrix in zip(self._starts, self.qkv, strict=True))
        places = [(start, 0, 0, 0) for start in self._starts]
        for latent in self.latent:
            latent.norm.check_size(latent.matrix.columns, "the norm of a latent vector")
            places += [(latent.start, 0, 0, latent.matrix.columns), (latent.end, 0, 0, 0)]
            end = max(end, latent.end + latent.matrix.rows)
        at, last_query, last_key = self.heads, self.query_heads - 1, self.kv_heads - 1
        places.append((at.query_offset, at.query_stride, last_query, self.head_size))
        if self.source is None:
            tail = self.key_tail or Tail(0, 0)
            require(0 <= tail.size <= self.head_size, f"keys of {self.head_size} end with {tail.size} shared numbers")
            places.append((at.key_offset, at.key_stride, last_key, self.head_size - tail.size))
            places.append((at.value_offset, at.value_stride, last_key, self.value_size))
            places.append((tail.offset, 0, 0, tail.size))
        if gate := self.gate:
            require(gate.size in (1, self.value_size), f"a gate of {gate.size} is for values of {self.value_size}")
            places.append((gate.offset, gate.stride, last_query, gate.size))
        for offset, stride, last, size in places:
            inside = offset >= 0 and stride >= 0 and offset + last * stride + size <= end
            require(inside, f"heads from {offset} on, {stride} apart, are not all in a vector of {end}")

    @property
    def matrices(self) -> list[Matrix]:
        """All matrices of some size."""
        return [*self.qkv, *(latent.matrix for latent in self.latent), self.out]

    @property
    def _starts(self) -> Sequence[int]:
        """Where the output of each matrix starts in the vector."""
        return self.columns or [0, *accumulate(matrix.rows for matrix in self.qkv[:-1])]

    def check_hidden(self, hidden: int) -> None:
        """Raises DescriptionError if a matrix is not to or from so many numbers."""
        for matrix in self.qkv:
            matrix.check_shape(matrix.rows, hidden, "a projection to queries, keys or values")
        self.out.check_shape(hidden, self.out.columns, "the output projection of an attention")

    def fill(self, struct: abi.Layer) -> None:
        """Fill the structure of a layer."""
        for name in ("query_heads", "kv_heads", "head_size", "value_size", "scaling", "softcap"):
            setattr(struct.attention, name, getattr(self, name))
        normed = (self.query_heads, self.kv_heads) if self.norms_all_heads else (1, 1)
        struct.query_norm = self.query_norm.to_struct(normed[0] * self.head_size)
        struct.key_norm = self.key_norm.to_struct(normed[1] * self.head_size)
        struct.norms_all_heads, struct.norms_after_rope = self.norms_all_heads, self.norms_after_rope
        struct.attention.sink_logits = pointer(self.sink_logits, "float32", self.query_heads)
        for index, (matrix, column) in enumerate(zip(self.qkv, self._starts, strict=True)):
            struct.qkv[index], struct.qkv_columns[index] = matrix.to_struct(), column
        struct.qkv_count, struct.qkv_clip = len(self.qkv), self.clip
        for index, latent in enumerate(self.latent):
            norm = latent.norm.to_struct(latent.matrix.columns)
            struct.latent[index] = abi.Projection(latent.matrix.to_struct(), norm, latent.start, latent.end)
        struct.latent_count = len(self.latent)
        for field in fields(self.heads):
            setattr(struct, field.name, getattr(self.heads, field.name))
        struct.elements = pointer(self.elements, "int32", self.head_size)
        if self.key_tail:
            struct.key_tail_offset, struct.key_tail_size = self.key_tail.offset, self.key_tail.size
        if self.gate:
            struct.gate_kind, struct.gate_offset = self.gate.kind, self.gate.offset
            struct.gate_stride, struct.gate_size = self.gate.stride, self.gate.size
        struct.value_scale = self.value_scale
        struct.value_norm = self.value_norm.to_struct(self.value_size)
        struct.attended_norm = self.output_norm.to_struct(self.out.columns)
        if self.temperature:
            struct.temperature, struct.temperature_length = self.temperature.scale, self.temperature.length
            struct.temperature_start = self.temperature.start
        self._fill_rope(struct)
        struct.out = self.out.to_struct()

    def _fill_rope(self, struct: abi.Layer) -> None:
        struct.rope_scale, rope = 1.0, self.rope
        if rope:
            struct.frequencies = pointer(rope.frequencies, "float32", rope.rotary_dims // 2)
            struct.absolute_rotary_dims = rope.rotary_dims
            struct.order = pointer(rope.order, "int32", self.head_size)
            struct.rope_scale, struct.rope_scaled_dims = rope.scale, rope.rotary_dims if rope.scale != 1 else 0


def shared_kv_attention(
    lender: Attention,
    source: int,
    size: int,
    query: Matrix,
    query_norm: Norm,
    rope: Rope | None,
    out: Matrix,
    scaling: float,
    name: str,
) -> Attention:
    """An attention with the keys and values of layer `source`, whose attention is `lender`.

    That layer then has to keep them in columns of their own (`with_lent_columns`).

    Raises:
        DescriptionError: they do not fit.
    """
    heads = query.rows // size
    fits = query.rows == heads * size and out.columns == heads * lender.value_size
    if not fits or lender.head_size != size or heads % lender.kv_heads or lender.gate:
        raise DescriptionError(f"{name} does not fit the keys of layer {source}")
    return replace(
        lender,
        query_heads=heads,
        scaling=scaling,
        qkv=[query],
        columns=None,
        query_norm=query_norm,
        rope=rope,
        out=out,
        source=source,
    )


def with_lent_columns(attentions: Sequence[Attention | None]) -> list[Attention | None]:
    """The attentions of all layers; keys and values that later ones use get columns that no other layer writes to."""
    present = [attention for attention in attentions if attention]
    sources = dict.fromkeys(attention.source for attention in present if attention.source is not None)
    free = max((sum(matrix.rows for matrix in attention.qkv) for attention in present), default=0)
    lent: dict[int, Attention] = {}
    for number in sources:
        lender = attentions[number]
        assert lender is not None
        columns = [0]
        for matrix in lender.qkv[1:]:
            columns.append(free)
            free += matrix.rows
        offsets = replace(lender.heads, key_offset=columns[1], value_offset=columns[-1])
        lent[number] = replace(lender, columns=columns, heads=offsets)

    def placed(number: int, attention: Attention | None) -> Attention | None:
        if attention is None or attention.source is None:
            return lent.get(number, attention)
        return replace(attention, heads=replace(lent[attention.source].heads, query_offset=0))

    return [placed(number, attention) for number, attention in enumerate(attentions)]
