"""ctypes mirror of the native library's C interface (`src/abi.h`).

`src/abi.h` documents the fields. Structures hold raw addresses, so their owner must keep the tensors alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, POINTER, Structure, c_double, c_int64, c_void_p
from enum import IntEnum
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from h2o_stream.errors import H2OStreamError


class MatrixKind(IntEnum):
    """Storage format of a matrix."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    Q4_K = 4
    Q6_K = 5


class PolicyKind(IntEnum):
    """Eviction policy."""

    ACCUMULATED = 0
    TOVA = 1
    RANDOM = 2
    RECENCY = 3


class PositionMode(IntEnum):
    """How positions are assigned to cached tokens."""

    GAP = 0
    ROLLING = 1
    ABSOLUTE = 2


class NormKind(IntEnum):
    """Type of normalization."""

    NONE = 0
    RMS = 1
    LAYER = 2


class Activation(IntEnum):
    """Activation function of an MLP."""

    SILU = 0
    GELU_TANH = 1
    GELU_ERF = 2
    RELU = 3


def _fields(**kinds: str) -> list[tuple[str, type]]:
    """Structure fields from space-separated names per type, in order."""
    types = {"pointer": c_void_p, "int": c_int64, "float": c_double}
    return [(name, types[kind.rstrip("0123456789")]) for kind, names in kinds.items() for name in names.split()]


class Matrix(Structure):
    """Weights of a linear layer."""

    _fields_ = _fields(pointer="weights bias", int="rows columns kind")


class AttentionLayer(Structure):
    """Attention parameters of a decoder layer that all streams share."""

    _fields_ = _fields(
        int1="query_heads kv_heads head_size value_size",
        float1="scaling softcap",
        int2="policy position_mode",
        float2="decay long_term long_term_decay",
        int3="long_term_distance sinks",
        pointer1="pins",
        int4="pin_count",
        pointer2="transient",
        int5="transient_count sliding_window seed layer_index",
        pointer3="rope",
        int6="rope_rows rotary_dims in_bfloat16 kv_bits exact_sinks residual",
    )


class Slots(Structure):
    """The slots of some KV heads of one stream in one layer."""

    _fields_ = _fields(
        pointer="keys values key_codes value_codes key_range value_grid scores long_term index rank free seen heads",
        int="head_count slot_count recent span evictions",
    )


class Norm(Structure):
    """A normalization."""

    _fields_ = _fields(pointer="weight bias", float="epsilon", int="kind")


class Layer(Structure):
    """A decoder layer."""

    _fields_ = [
        ("attention", AttentionLayer),
        *((name, Norm) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")),
        *((name, Norm) for name in ("query_norm", "key_norm")),
        ("qkv", Matrix * 3),
        *_fields(int="qkv_count query_offset query_stride key_offset key_stride value_offset value_stride"),
        *_fields(float="rope_scale", int1="rope_scaled_dims", pointer="frequencies", int2="absolute_rotary_dims"),
        *((name, Matrix) for name in ("out", "gate", "up", "down")),
        *_fields(int="activation parallel first_group group_count"),
    ]


class Model(Structure):
    """A whole model."""

    _fields_ = [
        ("layers", POINTER(Layer)),
        *_fields(
            int1="layer_count hidden_size vocab_size",
        ),
        ("embedding", Matrix),
        *_fields(
            float1="embedding_scale",
            pointer1="learned_positions",
            int1="learned_offset",
        ),
        ("norm", Norm),
        ("output", Matrix),
        *_fields(float="logit_scale logit_softcap residual_scale"),
    ]


class Stream(Structure):
    """The next token of a stream."""

    _fields_ = _fields(int="token", pointer="slots")


class Bytes(Structure):
    """Two ranges of memory that are compared."""

    _fields_ = _fields(pointer="ours theirs", int="count")


STRUCTURES: Sequence[type[Structure]] = (Matrix, AttentionLayer, Slots, Norm, Layer, Model, Stream, Bytes)

SLOTS, STREAM, BYTES = (numpy.dtype(structure) for structure in (Slots, Stream, Bytes))
"""Of arrays of structures."""


_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
"""Types whose numbers are in memory as they read; subclasses may keep them elsewhere."""


def pointer(tensor: Tensor | None, dtype: torch.dtype, count: int, *, strided: bool = False) -> int:
    """The address of a tensor on the CPU: the only way from tensors to native code, which trusts what is said here.

    Args:
        tensor: the caller keeps it alive.
        dtype: of the numbers that native code reads or writes.
        count: how many of them, at least.
        strided: whether native code also takes the strides; otherwise the tensor must be contiguous.

    Returns:
        0 (null) for None.

    Raises:
        H2OStreamError: the tensor is another one.
    """
    if tensor is None:
        return 0
    if (
        type(tensor) in _PLAIN
        and tensor.dtype == dtype
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and (strided or tensor.is_contiguous())
        and not tensor.is_neg()
        and tensor.numel() >= count
    ):
        return tensor.data_ptr()
    strides = tensor.stride() if tensor.layout == torch.strided else tensor.layout
    raise H2OStreamError(
        f"native code takes {count} numbers of {dtype} in the memory of the CPU, not a {type(tensor).__name__} of "
        f"{tensor.dtype} {tuple(tensor.shape)} with strides {strides} on {tensor.device}; use --engine eager"
    )


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "h2o_step_open": (c_void_p, [c_void_p]),
    "h2o_step_close": (None, [c_void_p]),
    "h2o_equal": (c_int64, [c_void_p, c_int64]),
    "h2o_step": (c_int64, [c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64]),
    "h2o_prompt_open": (c_void_p, [c_void_p]),
    "h2o_prompt_close": (None, [c_void_p]),
    "h2o_prompt_begin": (c_int64, [c_void_p, c_void_p, c_void_p, c_int64, c_int64]),
    "h2o_prompt_project": (c_int64, [c_void_p, c_int64, c_void_p, c_void_p, c_void_p]),
    "h2o_prompt_finish": (c_int64, [c_void_p, c_int64, c_void_p]),
    "h2o_prompt_output": (c_int64, [c_void_p, c_void_p, c_int64, c_void_p]),
    "h2o_decode": (c_int64, [c_void_p, c_void_p, c_int64, c_int64, *[c_void_p] * 4, c_int64]),
    "h2o_prefill": (
        c_int64,
        [*[c_void_p] * 2, *[c_int64] * 2, *[c_void_p] * 2, c_int64, *[c_void_p] * 4, *[c_int64] * 2, c_void_p, c_int64],
    ),
    "h2o_cpu_supports": (c_int64, [c_int64]),
    "h2o_library_instructions": (c_int64, []),
    "h2o_multiply": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_int64]),
    "h2o_pack": (None, [c_void_p, c_void_p, c_int64, c_int64]),
    "h2o_repack": (c_int64, [c_void_p, c_void_p, c_int64, c_void_p, c_int64]),
    "h2o_gather": (None, [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64]),
}
"""Result and argument types of the exported functions."""


def declare(library: CDLL) -> CDLL:
    """Set the types of the exported functions."""
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
