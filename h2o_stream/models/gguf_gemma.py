"""What GGUF files say of Gemma 3n and 4, as transformers has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from h2o_stream.models.gguf_header import GgufTensor

VERSIONS = 4
"""Of the residual stream, at most."""

OUTSIDE: Mapping[str, str] = {
    f"model.altup_{name}projections.{number}.weight": f"altup_{tensor}.{number}.weight"
    for name, tensor in {"": "proj", "unembed_": "unembd_proj"}.items()
    for number in range(VERSIONS - 1)
}
"""Tensors outside of layers by weights of Gemma 3n, as `gguf.GgufFile` takes them apart."""


def config_3n(get: Callable[[str], Any], tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Attributes of the config of a Gemma 3n."""
    deviations = torch.tensor(get("activation_sparsity_scale"), dtype=torch.float64)
    return {
        "layer_types": [
            "sliding_attention" if x else "full_attention" for x in get("attention.sliding_window_pattern")
        ],
        "num_kv_shared_layers": int(get("attention.shared_kv_layers") or 0),
        "hidden_size_per_layer_input": int(get("embedding_length_per_layer_input")),
        "vocab_size_per_layer_input": tensors["per_layer_token_embd.weight"].shape[0],
        "altup_num_inputs": int(get("altup.num_inputs")),
        "altup_active_idx": int(get("altup.active_idx")),
        "laurel_rank": tensors["blk.0.laurel_l.weight"].shape[0],
        "activation_sparsity_pattern": torch.special.ndtr(deviations).tolist(),
        "final_logit_softcapping": get("final_logit_softcapping"),
    }


def config(get: Callable[[str], Any], tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Attributes of the config, by keys of files without the architecture.

    Raises:
        ValueError: layers are wide in another way than transformers knows.
    """
    layers = int(get("block_count"))
    slides = list(get("attention.sliding_window_pattern"))[:layers]
    heads, inner = (
        size if isinstance(size, list) else [size] * layers
        for size in (get("attention.head_count_kv"), get("feed_forward_length"))
    )
    shared = int(get("attention.shared_kv_layers") or 0)
    wide = [size // inner[0] for size in inner]
    if wide not in ([1] * layers, [1] * (layers - shared) + [2] * shared):
        raise ValueError(f"its layers have MLPs of {inner}")
    size = int(get("embedding_length_per_layer_input") or 0)
    whole = {"head_dim": int(get("attention.key_length"))}
    return {
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "head_dim": int(get("attention.key_length_swa")),
        "num_key_value_heads": next((heads[number] for number in range(layers) if slides[number]), heads[0]),
        "per_layer_config": {
            number: {**whole, "num_key_value_heads": heads[number]} for number in range(layers) if not slides[number]
        },
        "attention_k_eq_v": any(
            not slides[number] and f"blk.{number}.attn_v.weight" not in tensors for number in range(layers - shared)
        ),
        "num_kv_shared_layers": shared,
        "intermediate_size": inner[0],
        "use_double_wide_mlp": 2 in wide,
        "hidden_size_per_layer_input": size,
        "vocab_size_per_layer_input": tensors["per_layer_token_embd.weight"].shape[0] if size else 0,
        "final_logit_softcapping": get("final_logit_softcapping"),
    }
