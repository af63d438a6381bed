"""Names of modules in transformers' recurrent mixers, and where the parts of heads are in what they project to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from h2o_stream.native.mixers import DeltaColumns, HeadColumns


@dataclass(frozen=True)
class DeltaLayout:
    """Module names in a gated delta rule.

    Attributes:
        projections: in the order of `columns`.
        norm: of the output of each head.
        out: the output projection.
        columns: of key heads, heads, key size and value size.
    """

    projections: tuple[str, ...]
    norm: str
    out: str
    columns: Callable[[int, int, int, int], DeltaColumns]


def _separate(*order: str) -> Callable[[int, int, int, int], DeltaColumns]:
    """Everything of all heads together, in this order."""

    def columns(key_heads: int, heads: int, key_size: int, value_size: int) -> DeltaColumns:
        shared, parts, offset = heads // key_heads, {}, 0
        sizes = {"query": key_size, "key": key_size, "value": shared * value_size, "gate": shared * value_size}
        for name in order:
            size = sizes.get(name, shared)
            parts[name] = HeadColumns(offset, size)
            offset += key_heads * size
        return DeltaColumns(**parts)

    return columns


def _by_key_head(key_heads: int, heads: int, key_size: int, value_size: int) -> DeltaColumns:
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
    DeltaLayout(_SPLIT, "norm", "out_proj", _separate("query", "key", "value", "gate", "beta", "decay")),
    DeltaLayout(("in_proj_qkvz", "in_proj_ba"), "norm", "out_proj", _by_key_head),
    DeltaLayout(
        ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
        "o_norm",
        "o_proj",
        _separate("query", "key", "value", "gate", "beta", "decay"),
    ),
)
"""Qwen 3.5; Qwen3-Next; OLMo hybrid."""
