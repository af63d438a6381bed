"""What GGUF files say of recurrent layers: parameters of transformers' configs, and weights as its models have them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Get = Callable[[str], Any]
"""The value of a key without the architecture; None if it is missing."""

QUERIES_TO_GATES = "linear_attn.in_proj_qkvz.weight"
"""A weight of Qwen3-Next that files have in two tensors."""

NAMES: Mapping[str, tuple[str, ...]] = {
    "mamba.dt_bias": ("ssm_dt.bias",),
    "linear_attn.dt_bias": ("ssm_dt.bias",),
    "shared_mlp.input_linear.weight": (
        "ffn_gate.weight",
        "ffn_up.weight",
        "ffn_gate_shexp.weight",
        "ffn_up_shexp.weight",
    ),
    "shared_mlp.output_linear.weight": ("ffn_down.weight", "ffn_down_shexp.weight"),
    QUERIES_TO_GATES: ("attn_qkv.weight", "attn_gate.weight"),
    "linear_attn.in_proj_ba.weight": ("ssm_ba.weight",),
    "pre_ff_layernorm.weight": ("ffn_norm", "ffn_norm.weight"),
    "norm.weight": ("attn_norm.weight",),
    "mixer.A_log": ("ssm_a",),
    "mixer.D": ("ssm_d",),
    "mixer.dt_bias": ("ssm_dt.bias",),
    "mixer.conv1d.bias": ("ssm_conv1d.bias",),
    "mixer.gate.e_score_correction_bias": ("exp_probs_b.bias",),
    **{f"mixer.experts.{part}_proj": (f"ffn_{part}_exps",) for part in ("up", "down")},
    **{f"mixer.experts.{part}_proj.weight": (f"ffn_{part}_exps.weight",) for part in ("up", "down")},
    **{
        f"mixer.{part}.weight": (f"{name}.weight",)
        for part, name in {
            "in_proj": "ssm_in",
            "conv1d": "ssm_conv1d",
            "norm": "ssm_norm",
            "out_proj": "ssm_out",
            "q_proj": "attn_q",
            "k_proj": "attn_k",
            "v_proj": "attn_v",
            "o_proj": "attn_output",
            "up_proj": "ffn_up",
            "down_proj": "ffn_down",
            "gate": "ffn_gate_inp",
            "shared_experts.up_proj": "ffn_up_shexp",
            "shared_experts.down_proj": "ffn_down_shexp",
        }.items()
    },
    "feed_forward.expert_bias": ("exp_probs_b.bias",),
    **{
        f"feed_forward.experts.{name}": tensors
        for name, tensors in {
            "gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
            "down_proj": ("ffn_down_exps",),
            **{f"{part}_proj.weight": (f"ffn_{part}_exps.weight",) for part in ("gate", "up", "down")},
        }.items()
    },
}
"""As `gguf_families` lists them."""


OUTSIDE: Mapping[str, str] = {
    "model.embeddings.weight": "token_embd.weight",
    "model.norm_f.weight": "output_norm.weight",
}
"""Tensors outside of layers by weights of Nemotron-H."""


def layer_count(get: Get) -> int:
    """Decoder layers, without those that only guess further tokens."""
    return int(get("block_count")) - int(get("nextn_predict_layers") or 0)


def state_space_config(get: Get, tensors: Collection[str]) -> dict[str, Any]:
    """Attributes of the config of a model with Mamba-2."""
    heads, inner = int(get("ssm.time_step_rank")), int(get("ssm.inner_size"))
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // int(get("embedding_length")),
        "mamba_d_state": int(get("ssm.state_size")),
        "mamba_n_groups": int(get("ssm.group_count")),
        "mamba_d_conv": int(get("ssm.conv_kernel")),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in tensors),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in tensors),
    }


def falcon_config(get: Get, tensors: Collection[str]) -> dict[str, Any]:
    """Attributes of the config of a Falcon-H1, whose factors are in a file's weights."""
    return state_space_config(get, tensors) | {
        "mamba_d_ssm": int(get("ssm.inner_size")),
        "mamba_rms_norm": any("ssm_norm" in name for name in tensors),
        "mamba_norm_before_gate": False,
    }


_NEMOTRON_KINDS = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
"""Kinds of Nemotron-H's layers by a part that only they have; experts come before what their layers share with MLPs."""


def _kind_of_nemotron_layer(number: int, tensors: Collection[str]) -> str:
    for part, kind in _NEMOTRON_KINDS.items():
        if f"blk.{number}.{part}.weight" in tensors:
            return kind
    raise ValueError(f"layer {number} has no known part")


def nemotron_config(get: Get, tensors: Collection[str]) -> dict[str, Any]:
    """Attributes of the config of a Nemotron-H."""
    heads = int(get("ssm.time_step_rank"))
    return {
        "layers_block_type": [_kind_of_nemotron_layer(number, tensors) for number in range(layer_count(get))],
        "num_key_value_heads": max(get("attention.head_count_kv")),
        "intermediate_size": max(get("feed_forward_length")),
        "mamba_num_heads": heads,
        "mamba_head_dim": int(get("ssm.inner_size")) // heads,
        "n_groups": int(get("ssm.group_count")),
        "ssm_state_size": int(get("ssm.state_size")),
        "conv_kernel": int(get("ssm.conv_kernel")),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in tensors),
        "layer_norm_epsilon": get("attention.layer_norm_rms_epsilon") or get("attention.layer_norm_epsilon"),
        "time_step_min": 0.0,
    }


def convolution_config(get: Get, tensors: Collection[str]) -> dict[str, Any]:
    """Attributes of the config of an LFM2 with experts."""
    kv_heads = list(get("attention.head_count_kv"))
    return {
        "num_key_value_heads": max(kv_heads),
        "layer_types": ["full_attention" if count else "conv" for count in kv_heads],
        "conv_L_cache": int(get("shortconv.l_cache")),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in tensors),
        "norm_eps": float(get("attention.layer_norm_rms_epsilon")),
    }


def granite_config(get: Get, tensors: Collection[str]) -> dict[str, Any]:
    """Attributes of the config of a Granite 4 hybrid."""
    kv_heads = list(get("attention.head_count_kv"))
    return state_space_config(get, tensors) | {
        "num_local_experts": int(get("expert_count") or 0),
        "num_experts_per_tok": int(get("expert_used_count") or 0),
        "num_key_value_heads": max(kv_heads),
        "layer_types": ["full_attention" if count else "linear_attention" for count in kv_heads],
        "position_embedding_type": None if get("rope.scaling.finetuned") is False else "rope",
        "shared_intermediate_size": int(get("expert_shared_feed_forward_length") or get("feed_forward_length")),
    }


def qwen_config(get: Get, tensors: Collection[str]) -> dict[str, Any]:
    """Attributes of the config of a Qwen 3.5."""
    heads = int(get("ssm.time_step_rank"))
    attends = [f"blk.{number}.attn_q.weight" in tensors for number in range(layer_count(get))]
    return {
        "layer_types": ["full_attention" if attention else "linear_attention" for attention in attends],
        "linear_num_value_heads": heads,
        "linear_value_head_dim": int(get("ssm.inner_size")) // heads,
        "linear_num_key_heads": int(get("ssm.group_count")),
        "linear_key_head_dim": int(get("ssm.state_size")),
        "linear_conv_kernel_dim": int(get("ssm.conv_kernel")),
    }


def as_in_transformers(values: NDArray[Any], name: str, config: Mapping[str, Any]) -> NDArray[Any]:
    """Revert what the converter has done to a weight of a recurrent layer; others are unchanged.

    Args:
        values: of the tensor.
        name: of the tensor.
        config: of the model, as a dictionary.
    """
    inner = name.split(".", 2)[2] if name.startswith("blk.") else name
    key_heads, heads = (int(config.get(f"linear_num_{kind}_heads") or 1) for kind in ("key", "value"))
    if heads != key_heads and config["model_type"] != "qwen3_next":
        values = _with_shared_keys_together(values, inner, key_heads, heads, config)
    if inner == "ssm_a":
        logarithms: NDArray[Any] = np.log(-values.reshape(-1))
        return logarithms
    if inner in ("ssm_d", "ssm_norm.weight"):
        return values.reshape(-1)
    return values[:, None] if inner in ("ssm_conv1d.weight", "shortconv.conv.weight") else values


def rows_by_key_head(config: Mapping[str, Any]) -> NDArray[Any]:
    """The order of the rows of queries, keys, values and gates in which those of each key head follow one another."""
    groups, heads = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])
    key_size, values = int(config["linear_key_head_dim"]), heads // groups * int(config["linear_value_head_dim"])
    parts, first = [], 0
    for size in (key_size, key_size, values, values):
        parts.append(first + np.arange(groups * size).reshape(groups, size))
        first += groups * size
    return np.concatenate(parts, 1).ravel()


def _with_shared_keys_together(
    values: NDArray[Any], inner: str, key_heads: int, heads: int, config: Mapping[str, Any]
) -> NDArray[Any]:
    """Value heads that share a key head after one another; files have the first of every key head first."""
    size = int(config["linear_value_head_dim"])
    if re.fullmatch(r"ssm_(alpha|beta)\.weight|ssm_a|ssm_dt\.bias", inner):
        return _regrouped(values, key_heads, heads, 1)
    if inner == "attn_gate.weight":
        return _regrouped(values, key_heads, heads, size)
    if inner in ("attn_qkv.weight", "ssm_conv1d.weight") and len(values) > heads * size:
        keys = len(values) - heads * size
        return np.concatenate((values[:keys], _regrouped(values[keys:], key_heads, heads, size)))
    if inner == "ssm_out.weight":
        return _regrouped(values.T, key_heads, heads, size).T
    return values


def _regrouped(values: NDArray[Any], key_heads: int, heads: int, size: int) -> NDArray[Any]:
    """Rows of heads in turns of their key heads to rows by key head.

    Raises:
        ValueError: there are other numbers of rows.
    """
    parts = values.reshape(heads // key_heads, key_heads, size, math.prod(values.shape[1:]))
    return parts.swapaxes(0, 1).reshape(values.shape)
