"""ctypes mirror of the native library's C interface (`src/abi.h`).

`src/abi.h` documents the fields. Structures hold raw addresses, so their owner must keep the arrays alive.

A library is only used beside the very text of this module that it was compiled beside (`library.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, POINTER, Structure, c_double, c_int64, c_void_p
from enum import IntEnum
from typing import Any, TypeAlias

import numpy


class MatrixKind(IntEnum):
    """Storage format of a matrix."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    Q4_K = 4
    Q6_K = 5
    MXFP4 = 6
    FLOAT32_COLUMNS = 7
    BFLOAT16_COLUMNS = 8
    INT5 = 9
    Q5_K = 10
    Q2_K = 11
    Q3_K = 12
    IQ4_NL = 13
    IQ4_XS = 14


class Sharing(IntEnum):
    """How threads share the work of a decode step."""

    TUNED = 0
    BARRIERS = 1
    ASSISTED = 2


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
    RELU_SQUARED = 4
    XIELU = 5
    CLAMPED_SWIGLU = 6


class MixerKind(IntEnum):
    """How a recurrent mixer carries earlier tokens on."""

    NONE = 0
    SHORT_CONVOLUTION = 1
    GATED_DELTA = 2
    MAMBA2 = 3


MAX_PROJECTIONS, MAX_KERNEL = 6, 8
"""Of a recurrent mixer."""

MAX_VERSIONS = 4
"""Of the residual stream."""


class Scoring(IntEnum):
    """How a router's logits become the scores of experts."""

    SOFTMAX = 0
    SIGMOID = 1
    SPARSE_MIXER = 2


class GroupWorth(IntEnum):
    """What makes a group of experts worth more than another one."""

    BEST_ONE = 0
    BEST_TWO = 1


class GateLayout(IntEnum):
    """Where the gates of experts are: in a matrix of their own, or with the rows of `up`."""

    APART = 0
    HALVES = 1
    IN_TURNS = 2


class GateKind(IntEnum):
    """What the values of an attention's gate go through."""

    NO_GATE = 0
    SIGMOID_GATE = 1
    SOFTPLUS_GATE = 2


def _fields(**kinds: str) -> list[tuple[str, type]]:
    """Structure fields from space-separated names per type, in order."""
    types = {"pointer": c_void_p, "int": c_int64, "float": c_double}
    return [(name, types[kind.rstrip("0123456789")]) for kind, names in kinds.items() for name in names.split()]


class Matrix(Structure):
    """Weights of a linear layer."""

    _fields_ = _fields(pointer="weights bias", int="rows columns kind", float="scale")


class AttentionLayer(Structure):
    """Attention parameters of a decoder layer that all streams share."""

    _fields_ = _fields(
        int1="query_heads kv_heads head_size value_size",
        float1="scaling softcap",
        int2="policy position_mode",
        float2="decay long_term long_term_decay",
        int3="long_term_distance sinks",
        int4="sliding_window seed layer_index",
        pointer1="rope",
        int5="rope_rows rotary_dims in_bfloat16 kv_bits exact_sinks residual",
        pointer2="sink_logits",
        int6="chunked",
        pointer3="rope_codes",
    )


class Slots(Structure):
    """The slots of some KV heads of one stream in one layer."""

    _fields_ = _fields(
        pointer1="keys values key_codes value_codes key_range value_grid scores long_term index rank free seen heads "
        "pins transient",
        int1="head_count slot_count recent span evictions pin_count transient_count",
    )


class Norm(Structure):
    """A normalization."""

    _fields_ = _fields(pointer="weight bias", float="epsilon", int="kind")


class Experts(Structure):
    """A mixture of experts."""

    _fields_ = [
        ("router", Matrix),
        *_fields(pointer="choice_bias"),
        *((name, Matrix) for name in ("gate", "up", "down", "shared_gate")),
        *_fields(
            int1="chosen inner_size stride scoring normalized",
            float1="scale",
            int2="groups chosen_groups group_worth",
            float2="jitter",
            int3="gate_layout weighs_inputs",
            pointer="factors",
        ),
        *((name, Norm) for name in ("router_norm", "input_norm", "output_norm", "mlp_norm")),
    ]


class Projection(Structure):
    """Takes a part of a vector, normed, through a matrix, to a later part of the same vector."""

    _fields_ = [("matrix", Matrix), ("norm", Norm), *_fields(int="from to")]


class Convolution(Structure):
    """A causal convolution of each channel by itself."""

    _fields_ = _fields(pointer="weight bias", int="channels kernel")


class HeadColumns(Structure):
    """Where a part of each head is in the output of projections."""

    _fields_ = _fields(int="offset stride")


class Mixer(Structure):
    """A mixer that keeps what it needs of earlier tokens in states of constant size."""

    _fields_ = [
        *_fields(int="kind"),
        ("in", Matrix * MAX_PROJECTIONS),
        *_fields(int="in_count"),
        ("convolution", Convolution),
        *_fields(int="key_heads heads key_size value_size"),
        *((name, HeadColumns) for name in ("query", "key", "value", "gate", "beta", "decay")),
        *_fields(pointer="rate decay_bias", float="beta_scale"),
        *_fields(pointer="skip", float="least_step largest_step"),
        ("norm", Norm),
        *_fields(int="norm_groups norm_before_gate out_in_turns"),
        ("out", Matrix),
        *_fields(int="first_state"),
    ]


class AltUp(Structure):
    """How a layer updates the versions of the residual stream."""

    _fields_ = _fields(pointer1="router", float="epsilon", pointer2="prediction correction embedding_scale")


class Laurel(Structure):
    """A residual of low rank."""

    _fields_ = [("left", Matrix), ("right", Matrix), ("norm", Norm), *_fields(float="scale")]


class Layer(Structure):
    """A decoder layer."""

    _fields_ = [
        ("attention", AttentionLayer),
        *((name, Norm) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")),
        *((name, Norm) for name in ("after_embedding", "query_norm", "key_norm", "value_norm")),
        *_fields(int="norms_all_heads norms_after_rope"),
        ("qkv", Matrix * 4),
        ("qkv_columns", c_int64 * 4),
        *_fields(int="qkv_count", float="qkv_clip"),
        ("latent", Projection * 2),
        *_fields(int="latent_count query_offset query_stride key_offset key_stride value_offset value_stride"),
        *_fields(int="key_tail_offset key_tail_size"),
        *_fields(pointer="elements", int="gate_kind gate_offset gate_stride gate_size"),
        *_fields(float="value_scale"),
        ("attended_norm", Norm),
        *_fields(int1="kv_source", float="temperature temperature_length", int2="temperature_start"),
        *_fields(pointer="order"),
        *_fields(float="rope_scale", int1="rope_scaled_dims", pointer="frequencies", int2="absolute_rotary_dims"),
        ("mixer", Mixer),
        *((name, Matrix) for name in ("out", "gate", "up", "down")),
        ("inner_norm", Norm),
        ("experts", Experts),
        *_fields(int="activation"),
        ("activation_parameters", c_double * 4),
        *_fields(int="cuts_gates", float="gate_deviations"),
        ("altup", AltUp),
        ("laurel", Laurel),
        *((name, Matrix) for name in ("embedding_gate", "embedding_out")),
        *_fields(float="output_scale", int="parallel first_group group_count"),
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
        ("embedding_norm", Norm),
        *((name, Matrix) for name in ("layer_embedding", "layer_projection")),
        ("layer_projection_norm", Norm),
        *_fields(float="layer_embedding_scale layer_projection_scale layer_input_scale"),
        *_fields(int="versions active_version"),
        *((name, Matrix * (MAX_VERSIONS - 1)) for name in ("to_versions", "from_versions")),
        ("norm", Norm),
        ("output", Matrix),
        *_fields(float="logit_scale logit_softcap residual_scale"),
    ]


class Stream(Structure):
    """The next token of a stream."""

    _fields_ = _fields(int="token", pointer="slots states")


class Bytes(Structure):
    """Two ranges of memory that are compared."""

    _fields_ = _fields(pointer="ours theirs", int="count")


STRUCTURES: Sequence[type[Structure]] = (
    Matrix,
    AttentionLayer,
    Slots,
    Norm,
    Experts,
    Projection,
    Convolution,
    HeadColumns,
    Mixer,
    AltUp,
    Laurel,
    Layer,
    Model,
    Stream,
    Bytes,
)

SLOTS, STREAM, BYTES = (numpy.dtype(structure) for structure in (Slots, Stream, Bytes))
"""Of arrays of structures."""

TOO_FEW_SLOTS = 2
"""What `h2o_prefill` and `h2o_forward` return then; every function that needs memory returns 1 if it runs out."""

Functions: TypeAlias = dict[str, tuple[Any, list[Any]]]
"""Result and argument types of exported functions, by name."""

PROCESSOR_FUNCTIONS: Functions = {
    "h2o_cpu_supports": (c_int64, [c_int64]),
    "h2o_cpu_multiplies_bfloat16": (c_int64, []),
}
"""Of the library that says what the processor supports."""

KERNEL_FUNCTIONS: Functions = {
    "h2o_step_open": (c_void_p, [c_void_p]),
    "h2o_step_close": (None, [c_void_p]),
    "h2o_step_share": (None, [c_void_p, c_int64]),
    "h2o_equal": (c_int64, [c_void_p, c_int64]),
    "h2o_step": (c_int64, [c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64]),
    "h2o_forward": (
        c_int64,
        [*[c_void_p] * 2, c_int64, c_void_p, *[c_int64] * 2, c_void_p, c_int64, *[c_void_p] * 3, c_int64],
    ),
    "h2o_prompt_open": (
        c_int64,
        [*[c_void_p] * 2, c_int64, *[c_void_p] * 2, *[c_int64] * 2, c_void_p, c_int64, c_void_p],
    ),
    "h2o_prompt_layer": (c_int64, [c_void_p, c_int64, c_void_p]),
    "h2o_prompt_close": (None, [c_void_p]),
    "h2o_pass": (c_int64, [*[c_void_p] * 2, *[c_int64] * 2]),
    "h2o_pass_logits": (None, [c_void_p, *[c_int64] * 2, c_void_p, c_int64]),
    "h2o_pass_bytes": (c_int64, [c_void_p]),
    "h2o_pass_keep": (None, [c_void_p, *[c_int64] * 2]),
    "h2o_decode": (c_int64, [c_void_p, c_void_p, c_int64, c_int64, *[c_void_p] * 4, c_int64]),
    "h2o_prefill": (
        c_int64,
        [*[c_void_p] * 2, *[c_int64] * 2, *[c_void_p] * 2, c_int64, *[c_void_p] * 4, *[c_int64] * 2, c_void_p, c_int64],
    ),
    "h2o_library_instructions": (c_int64, []),
    "h2o_multiply": (c_int64, [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64]),
    "h2o_pack": (None, [c_void_p, c_void_p, c_int64, c_int64]),
    "h2o_repack": (c_int64, [c_void_p, c_void_p, c_int64, c_void_p, c_int64]),
    "h2o_gather": (None, [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64]),
}
"""Of the library of an instruction set."""


def declare(library: CDLL, functions: Functions) -> CDLL:
    """Set the types of exported functions."""
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
