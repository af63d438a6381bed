"""Compares numbers in a checkpoint's ``config.json`` with its weights, before either is used. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from h2o_stream.errors import ModelNotFoundError, UnsupportedModelError
from h2o_stream.models.other_files import ADAPTER, ADAPTER_CONFIG
from h2o_stream.models.tokenizer import read_object

_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_nextn_predict_layers")
_SIZES = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "vocab_size",
    "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "num_local_experts", "n_routed_experts",
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_embd", "n_head", "ffn_dim",
)  # fmt: skip
_TOKENS = ("max_position_embeddings", "n_positions", "max_sequence_length")
_FACTORS = {"partial_rotary_factor": 1.0, "rotary_pct": 1.0, "rope_theta": 1e30, "rope_local_base_freq": 1e30}
"""Positive numbers, and their limits."""

_MAX_LAYERS, _MAX_SIZE, _MAX_TOKENS = 1024, 2**24, 2**31 - 1
"""Limits for weights that are not there yet."""


def check_folder(folder: Path) -> None:
    """Check the numbers in a folder's config.

    Raises:
        ModelNotFoundError: one is out of range, more than the weights have, or a file is damaged.
        UnsupportedModelError: it has an adapter, with which the model would be another one.
    """
    if (folder / ADAPTER_CONFIG).exists():
        raise UnsupportedModelError(f"folder {folder} has {ADAPTER}")
    path = folder / "config.json"
    layers, size = _MAX_LAYERS, _MAX_SIZE
    try:
        config = read_object(path)
        if shapes := [shape for file in folder.glob("*.safetensors") for shape in _shapes(file)]:
            layers, size = len(shapes), min(size, max(map(math.prod, shapes)))
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelNotFoundError(f"{folder} could not be loaded: {error}") from error
    whole = {**dict.fromkeys(_LAYERS, layers), **dict.fromkeys(_SIZES, size), **dict.fromkeys(_TOKENS, _MAX_TOKENS)}
    limits: dict[str, float] = {**whole, **_FACTORS}
    for key, value in _entries(config):
        limit = limits.get(key)
        if limit is None or value is None:
            continue
        kinds, least = ((int, float), 0.0) if key in _FACTORS else ((int,), -1)
        if type(value) not in kinds or not least < value <= limit:
            raise ModelNotFoundError(f"{path}: {key} is {value!r}, not a number up to {limit}, which fits its weights")


def _shapes(path: Path) -> Iterator[tuple[int, ...]]:
    with safe_open(path, "np") as file:
        for name in file.keys():  # noqa: SIM118  # it is no mapping
            yield tuple(file.get_slice(name).get_shape())


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries, also of objects in it, and sizes of MLPs that are given for each layer."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _entries(value)
        elif key == "intermediate_size" and isinstance(value, list):
            yield from ((key, size) for size in value)
        else:
            yield key, value
