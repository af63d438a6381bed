"""Makes of a GGUF vector what a model uses: row order, sign or logarithm, offset of a norm, rounding."""

from __future__ import annotations

from collections.abc import Mapping

import numpy
from numpy.typing import NDArray

from h2o_stream.native.matrix import require
from h2o_stream.runtime.families.architecture import Architecture
from h2o_stream.runtime.parameters import Parameters
from h2o_stream.runtime.rotations import Floats

Orders = Mapping[str, NDArray[numpy.int64]]
"""Orders of rows, by llama.cpp's names of tensors in a layer."""


def rounded(values: Floats, dtype: str) -> Floats:
    """Numbers as `dtype` holds them, ``float32`` or ``bfloat16``, in float32."""
    if dtype == "float32":
        return values
    bits = values.view(numpy.uint32)
    half = ((bits >> 16) & 1) + 0x7FFF  # rounds to nearest, ties to even
    return ((bits + half) & 0xFFFF0000).view(numpy.float32)


def row_orders(architecture: Architecture, parameters: Parameters) -> Orders:
    """Orders of the rows of a file's tensors as they are needed, by their names in a layer."""
    orders: dict[str, NDArray[numpy.int64]] = {}
    if architecture.rope_rows_permuted:  # queries and keys in halves, out of a file that has them in pairs
        size = parameters.head_size
        require(size % 2 == 0, f"heads of {size} numbers (attention.key_length) are not pairs")
        head = numpy.arange(size).reshape(-1, 2).T.ravel()
        for name, heads in (("attn_q", parameters.query_heads), ("attn_k", parameters.kv_heads)):
            orders[name] = (numpy.arange(heads)[:, None] * parameters.head_size + head).ravel()
    mixer = parameters.mixer
    if architecture.interleaved_heads and mixer and mixer.heads != mixer.key_heads:  # heads that share keys together
        turns = numpy.arange(mixer.heads).reshape(-1, mixer.key_heads).T.ravel()
        values = (turns[:, None] * mixer.value_size + numpy.arange(mixer.value_size)).ravel()
        keys = numpy.arange(2 * mixer.key_heads * mixer.key_size)
        orders |= dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"), turns) | {"attn_gate": values}
        orders |= dict.fromkeys(("attn_qkv", "ssm_conv1d"), numpy.concatenate((keys, len(keys) + values)))
    return orders


def as_needed(
    values: Floats,
    name: str,
    kind: str,
    architecture: Architecture,
    orders: Orders,
    dtype: str,
    as_saved: bool = False,
) -> Floats:
    """The numbers [n] of a vector of a GGUF file as the model's dtype holds them; the rest as for `GgufWeights`."""
    if (order := orders.get(name)) is not None:
        require(values.size % len(order) == 0, f"{name} is {values.size} numbers, not rows of {len(order)}")
        values = values.reshape(len(order), -1)[order].reshape(-1)
    if name == "ssm_a":  # transformers has its logarithm
        require(bool((values < 0).all()), f"{name} has numbers that are not negative")
        return -numpy.exp(rounded(numpy.log(-values), dtype))
    has_offset = name.endswith("norm") and kind == "weight" and name not in architecture.stored_as_in_gguf
    offset = numpy.float32(architecture.norm_offset if has_offset else 0)
    if not offset:
        return rounded(values, dtype)
    saved: Floats = rounded(values - offset, dtype)
    return saved if as_saved else saved + offset
