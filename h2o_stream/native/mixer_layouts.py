"""Names of modules in transformers' recurrent mixers, and where the parts of heads are in what they project to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from h2o_stream.native.mixers import DeltaColumns, HeadColumns


@dataclass(frozen=True)
class DeltaLayout:
    """Module names in a gated delta rule.

    Attributes:
        projections: names of the projections, in the order of `columns`.
        norm: norm of the output of each head.
        columns: places of the results, from key heads, heads, key size and value size.
    """

    projections: tuple[str, ...]
    norm: str
    out: str
    columns: Callable[[int, int, int, int], DeltaColumns]


def separate_columns(key_heads: int, heads: int, key_size: int, value_size: int) -> DeltaColumns:
    """Everything of all heads together: queries, keys, values, gates, betas, decays."""
    shared, offset, parts = heads // key_heads, 0, []
    for size in (key_size, key_size, shared * value_size, shared * value_size, shared, shared):
        parts.append(HeadColumns(offset, size))
        offset += key_heads * size
    return DeltaColumns(*parts)


def paired_columns(key_heads: int, heads: int, key_size: int, value_size: int) -> DeltaColumns:
    """The same, but betas and decays of each key head together."""
    shared, separate = heads // key_heads, separate_columns(key_heads, heads, key_size, value_size)
    first = separate.beta.offset
    return replace(separate, beta=HeadColumns(first, 2 * shared), decay=HeadColumns(first + shared, 2 * shared))


def columns_by_key_head(key_heads: int, heads: int, key_size: int, value_size: int) -> DeltaColumns:
    """Query, key, values and gates of each key head together; then its betas and decays."""
    shared = heads // key_heads
    stride = 2 * (key_size + shared * value_size)
    both, rest = 2 * key_size, key_heads * stride
    return DeltaColumns(
        query=HeadColumns(0, stride),
        key=HeadColumns(key_size, stride),
        value=HeadColumns(both, stride),
        gate=HeadColumns(both + shared * value_size, stride),
        beta=HeadColumns(rest, 2 * shared),
        decay=HeadColumns(rest + shared, 2 * shared),
    )


_SPLIT = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

DELTA_LAYOUTS = (
    DeltaLayout(_SPLIT, "norm", "out_proj", separate_columns),
    DeltaLayout(("in_proj_qkvz", "in_proj_ba"), "norm", "out_proj", columns_by_key_head),
    DeltaLayout(
        ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
        "o_norm",
        "o_proj",
        separate_columns,
    ),
)
"""Qwen 3.5; Qwen3-Next; OLMo hybrid."""
