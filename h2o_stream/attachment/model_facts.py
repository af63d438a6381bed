"""Facts about a transformers model that its config or its modules state: devices, context, kinds of layers."""

from __future__ import annotations

from typing import Any

import torch

RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
WITHOUT_ATTENTION = {"linear_attention", "conv", "moe", "mlp"}
_SLIDING = {"sliding_attention", "hybrid_sliding"}
LAYER_KINDS = {"full_attention", "chunked_attention"} | RECURRENT | WITHOUT_ATTENTION | _SLIDING
"""Kinds of layers in transformers' ``layer_types``; recurrent ones have states of constant size."""


def input_device(model: Any) -> torch.device:
    """The device of a model's input tokens, also while its weights are on disk."""
    device: torch.device = model.device
    if device.type != "meta":
        return device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next(device for device in devices if device is not None))


def weight_count(model: Any) -> int:
    """Number of elements of a model's weights and buffers; packed weights count bytes."""
    return sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))


def context_of(config: Any) -> int | None:
    """Positions a model was trained for, or None when its config names no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit and limit > 0 else None


def max_distance_of(config: Any) -> int | None:
    """Largest distance a model was trained for: its context, or less if all layers slide or RoPE depends on length."""
    text = config.get_text_config()
    limits, rope, windows = [context_of(config)], _rope(text) or {}, set(sliding_windows(text))
    if rope.get("rope_type") == "longrope":
        limits.append(rope.get("original_max_position_embeddings"))
    if None not in windows:
        limits.append(min(windows, default=None))  # type: ignore[type-var]
    return min((limit for limit in limits if limit), default=None)


def learned_positions(config: Any) -> int | None:
    """Number of positions with a learned embedding, or None if positions are computed, or only states carry order."""
    return context_of(config) if looks_up_positions(config.get_text_config()) else None


def looks_up_positions(text: Any) -> bool:
    """Whether positions have embeddings: there is no RoPE, and no recurrent layer that carries the order of tokens."""
    return not _rope(text) and not RECURRENT.intersection(layer_kinds(text))


def layer_kinds(text: Any) -> list[str]:
    """The kind of every layer."""
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    return list(kinds[: text.num_hidden_layers])


def sliding_window_of(text: Any, kind: str) -> int | None:
    """The window of a kind of layer; None if it sees everything."""
    if kind == "chunked_attention":
        return int(text.attention_chunk_size)
    window: int | None = getattr(text, "sliding_window", None)
    return window if kind in _SLIDING else None


def sliding_windows(text: Any) -> list[int | None]:
    """The windows of the layers with attention."""
    return [sliding_window_of(text, kind) for kind in layer_kinds(text) if kind not in WITHOUT_ATTENTION]


def _rope(text: Any) -> dict[str, Any] | None:
    return getattr(text, "rope_parameters", None) or None
