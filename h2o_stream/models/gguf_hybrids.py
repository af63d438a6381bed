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
}
"""As `gguf_families` lists them."""


def layer_count(get: Get) -> int:
    """Decoder layers, without those that only guess further tokens."""
    return int(get("block_count")) - int(get("nextn_predict_layers") or 0)


def granite_config(get: Get, tensors: Collection[str]) -> dict[str, Any]:
    """Attributes of the config of a Granite 4 hybrid."""
    heads, inner = int(get("ssm.time_step_rank")), int(get("ssm.inner_size"))
    kv_heads = list(get("attention.head_count_kv"))
    return {
        "num_local_experts": int(get("expert_count") or 0),
        "num_experts_per_tok": int(get("expert_used_count") or 0),
        "num_key_value_heads": max(kv_heads),
        "layer_types": ["full_attention" if count else "linear_attention" for count in kv_heads],
        "position_embedding_type": "rope" if get("rope.scaling.finetuned") else None,
        "shared_intermediate_size": int(get("expert_shared_feed_forward_length") or get("feed_forward_length")),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // int(get("embedding_length")),
        "mamba_d_state": int(get("ssm.state_size")),
        "mamba_n_groups": int(get("ssm.group_count")),
        "mamba_d_conv": int(get("ssm.conv_kernel")),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in tensors),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in tensors),
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
    if heads != key_heads:
        values = _with_shared_keys_together(values, inner, key_heads, heads, config)
    if inner == "ssm_a":
        logarithms: NDArray[Any] = np.log(-values.reshape(-1))
        return logarithms
    if inner in ("ssm_d", "ssm_norm.weight"):
        return values.reshape(-1)
    return values[:, None] if inner == "ssm_conv1d.weight" else values


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
