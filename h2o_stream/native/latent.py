"""Attention with latent keys and values, as part of a model's description."""

from __future__ import annotations

from dataclasses import dataclass

from h2o_stream.native.attention import Attention, HeadOffsets, Latent, Rope, Tail
from h2o_stream.native.matrix import NO_NORM, DescriptionError, Matrix, Norm, require
from h2o_stream.native.pointers import Array

_MAX_SIZE = 2**24


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of an attention with latent keys and values.

    Attributes:
        rank: rank of the latent vector that keys and values are computed from.
        rope_size: last elements of queries and keys, which RoPE rotates; all keys have the same ones.
        nope_size: elements before these.

    Raises:
        DescriptionError: there are none of some.
    """

    rank: int
    rope_size: int
    nope_size: int
    value_size: int

    def __post_init__(self) -> None:
        sizes = self.rank, self.rope_size, self.nope_size, self.value_size
        fits = 0 < min(sizes) <= max(sizes) < _MAX_SIZE and self.rope_size % 2 == 0
        names = "attention.kv_lora_rank, rope.dimension_count, the rest of attention.key_length, attention.value_length"
        require(fits, f"{names} are {sizes}")

    @property
    def head_size(self) -> int:
        """Of queries and keys."""
        return self.nope_size + self.rope_size


def latent_attention(
    sizes: LatentSizes,
    first: Matrix,
    query_up: Latent | None,
    down: Matrix,
    up: Matrix,
    norm: Norm,
    out: Matrix,
    scaling: float,
    rope: Rope | None,
    elements: Array | None,
    name: str,
) -> Attention:
    """Describe an attention with latent keys and values.

    Args:
        sizes: sizes of the heads.
        first: the projection to queries, or to latent queries.
        query_up: matrix from latent queries to queries; its places are not read. None if queries are not latent.
        down: the projection to the latent vector and the last elements of all keys.
        up: matrix from the latent vector to the first elements of keys, and to values, head by head.
        norm: norm of the latent vector.
        out: the output projection.
        scaling: scaling of queries times keys.
        rope: RoPE of the last elements.
        elements: see `Attention`.
        name: name of the attention, for messages.
    """
    start = first.rows
    end = start + down.rows
    latent, query_offset, queries = [], 0, first
    if query_up is not None:
        queries = query_up.matrix
        latent.append(Latent(queries, query_up.norm, 0, end))
        query_offset, end = end, end + queries.rows
    latent.append(Latent(up, norm, start, end))
    size, stride = sizes.head_size, sizes.nope_size + sizes.value_size
    heads = queries.rows // size
    weight_sizes = (queries.rows, down.rows, up.rows, up.columns, out.columns)
    if weight_sizes != (
        heads * size,
        sizes.rank + sizes.rope_size,
        heads * stride,
        sizes.rank,
        heads * sizes.value_size,
    ):
        raise DescriptionError(f"{name} has matrices that do not fit {heads} heads of {size}")
    return Attention(
        query_heads=heads,
        kv_heads=heads,
        head_size=size,
        value_size=sizes.value_size,
        scaling=scaling,
        softcap=0.0,
        qkv=[first, down],
        heads=HeadOffsets(query_offset, size, end, stride, end + sizes.nope_size, stride),
        query_norm=NO_NORM,
        key_norm=NO_NORM,
        rope=rope,
        out=out,
        latent=latent,
        elements=elements,
        key_tail=Tail(start + sizes.rank, sizes.rope_size),
    )
