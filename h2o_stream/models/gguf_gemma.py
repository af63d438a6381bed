"""What GGUF files say of Gemma 4, as transformers has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from h2o_stream.models.gguf_header import GgufTensor


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
