"""The parameters of a checkpoint, from its ``config.json``; what is not certain is left to transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy

from h2o_stream.native.abi import Activation, NormKind, Scoring
from h2o_stream.native.description import DescriptionError
from h2o_stream.runtime.families import MODEL_TYPES
from h2o_stream.runtime.families.architecture import Architecture, ModelType
from h2o_stream.runtime.parameters import MAX_LAYERS, ExpertParameters, Parameters, check_range
from h2o_stream.runtime.rotations import Floats, RopeParameters, rope_frequencies

Config = Mapping[str, Any]


_ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu": Activation.GELU_ERF,
    "relu": Activation.RELU,
}

_NEUTRAL = ("quantization_config", "use_bidirectional_attention", "clip_qkv", "mlp_type")
"""Entries that change what is computed, unless they are missing or false."""


def parameters_of_config(config: Config) -> tuple[Architecture, Parameters]:
    """The architecture of a checkpoint, and its parameters.

    Raises:
        DescriptionError: its type or a parameter is not known here, or one is missing.
    """
    kind = MODEL_TYPES.get(str(config.get("model_type")))
    names = config.get("architectures") or []
    if kind is None or not (isinstance(names, list) and all(str(name).endswith("ForCausalLM") for name in names)):
        raise DescriptionError(f"{config.get('model_type')} is not in the table of checkpoints")
    architecture = kind.architecture
    for key in _NEUTRAL:
        if config.get(key) and not (key == "quantization_config" and config[key].get("quant_method") == "h2o"):
            raise DescriptionError(f"its {key} is {config[key]}")
    try:
        activation = config.get("hidden_act") or config["hidden_activation"]
        if _ACTIVATIONS.get(activation) != architecture.activation:
            raise DescriptionError(f"its activation is {activation}")
        hidden, heads, layers = (
            int(config[key]) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        check_range(layers, "num_hidden_layers", MAX_LAYERS)
        head_size = int(config.get("head_dim") or kind.head_size or hidden // heads)
        sliding = _sliding(kind, config, layers)
        local, main = (None if rope is None else _scaled(rope, head_size) for rope in _ropes(config))
        return architecture, Parameters(
            num_layers=layers,
            hidden_size=hidden,
            inner_size=int(config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
            query_heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_size=head_size,
            norm=NormKind.RMS if "rms_norm_eps" in config else NormKind.LAYER,
            epsilon=float(config["rms_norm_eps"] if "rms_norm_eps" in config else config["norm_epsilon"]),
            context=int(config["max_position_embeddings"]),
            ropes=tuple(main if local is None or window is None else local for window in sliding),
            tied=bool(config.get("tie_word_embeddings", kind.tied)),
            scaling=float(config.get("query_pre_attn_scalar") or head_size) ** -0.5,
            sliding=sliding,
            softcap=float(config.get("attn_logit_softcapping") or 0),
            logit_softcap=float(config.get("final_logit_softcapping") or 0),
            embedding_scale=hidden**0.5 if architecture.scales_embeddings else 1.0,
            experts=_experts(kind, config),
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DescriptionError(f"a parameter is missing or no number: {error}") from error


def _experts(kind: ModelType, config: Config) -> ExpertParameters | None:
    count = config.get("num_experts") or config.get("num_local_experts")
    if count is None:
        return None
    return ExpertParameters(
        count=int(count),
        chosen=int(config["num_experts_per_tok"]),
        inner_size=int(config[kind.expert_size]),
        shared_size=int(config.get("shared_expert_intermediate_size") or 0),
        scoring=Scoring.SOFTMAX,
        normalized=bool(config.get("norm_topk_prob", kind.normalizes_experts)),
        scale=1.0,
    )


def _sliding(kind: ModelType, config: Config, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer."""
    window = config.get("sliding_window")
    if kind.slides == "none" and config.get("use_sliding_window"):
        raise DescriptionError(f"its sliding_window is {window}")
    if not window or kind.slides == "none" or config.get("use_sliding_window") is False:
        return (None,) * layers
    if kind.slides == "all":
        return (int(window),) * layers
    types, every = config.get("layer_types"), kind.architecture.full_every
    if types is None:
        return tuple(None if every and (number + 1) % every == 0 else int(window) for number in range(layers))
    if len(types) != layers or not {*types} <= {"sliding_attention", "full_attention"}:
        raise DescriptionError(f"its layers are {types}")
    return tuple(int(window) if name == "sliding_attention" else None for name in types)


def _ropes(config: Config) -> tuple[Config | None, Config]:
    """The parameters of RoPE in layers with a sliding window, where they are others, and in all others."""
    rope = config.get("rope_parameters")
    partial = {"partial_rotary_factor": config["partial_rotary_factor"]} if config.get("partial_rotary_factor") else {}
    if rope is not None:
        if "full_attention" in rope:
            return rope["sliding_attention"], rope["full_attention"]
        return None, {**partial, **rope}
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    main = {**partial, **scaling, "rope_type": kind, "rope_theta": config["rope_theta"]}
    local = config.get("rope_local_base_freq")
    return ({"rope_theta": local} if local else None), main


def _scaled(rope: Config, head_size: int) -> RopeParameters:
    return RopeParameters(_frequencies(rope, head_size))


@numpy.errstate(all="ignore")
def _frequencies(rope: Config, head_size: int) -> Floats:
    """[rotary_dims / 2] float32, computed as transformers does."""
    plain = rope_frequencies(float(rope["rope_theta"]), int(head_size * float(rope.get("partial_rotary_factor", 1))))
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return plain
    if kind == "linear":
        return plain / numpy.float32(rope["factor"])
    if kind != "llama3":
        raise DescriptionError(f"it has RoPE of type {kind}")
    factor, low, high, original = (
        float(rope[key])
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    lengths = numpy.float32(2 * math.pi) / plain
    smooth = (numpy.float32(original) / lengths - numpy.float32(low)) / numpy.float32(high - low)
    between = (1 - smooth) * (plain / numpy.float32(factor)) + smooth * plain
    long, short = lengths > original / low, lengths < original / high
    scaled: Floats = numpy.where(long, plain / numpy.float32(factor), numpy.where(short, plain, between))
    return scaled.astype(numpy.float32)
