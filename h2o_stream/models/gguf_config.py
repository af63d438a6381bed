"""Corrects the config that transformers derives from GGUF metadata, where errors would silently change the output.

Covers RoPE frequencies and scaling, head sizes, biases, and scales that llama.cpp infers from the model's size.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from h2o_stream.errors import ModelNotFoundError, UnsupportedModelError
from h2o_stream.models.gguf import GgufFile

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Llama 3.1, 3.2 and 3.3 share these; only their factor differs (8 or 32)."""

_DIMENSIONS = (
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "expert_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
)

_SIZES = {
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}

_WINDOWED = ("mistral", "phi3")
"""Architectures for which transformers ignores the file's sliding window."""

_FACTORS = "rope_freqs.weight"
_LARGE_GEMMAS = {("gemma2", 46), ("gemma3", 62)}
"""Architecture and number of layers of the 27B models, which scale queries by hidden_size / num_attention_heads."""


def check_sizes(file: GgufFile) -> None:
    """Check that sizes in the metadata are consistent with the tensors, before allocating anything.

    Raises:
        ModelNotFoundError: a size is 0, or larger than any dimension of the tensors.
    """
    widest = max((size for tensor in file.tensors.values() for size in tensor.shape), default=0)
    for key in ("block_count", *_DIMENSIONS):
        most = len(file.tensors) if key == "block_count" else widest
        value = _said(file, key)
        for size in value if isinstance(value, list) else [] if value is None else [value]:
            if type(size) is not int or not (isinstance(value, list) or size) or not 0 <= size <= most:
                raise ModelNotFoundError(
                    f"{file.path} is damaged or not readable as GGUF: "
                    f"{file.architecture}.{key} is {size!r}, not a number from 1 to {most}"
                )


def correct_config(config: Any, file: GgufFile) -> Any:
    """Correct a config made by transformers with the file's metadata.

    Raises:
        UnsupportedModelError: transformers has no equivalent of the file's RoPE scaling.
    """
    table = file.tensors.get("token_embd.weight")
    if table and len(table.shape) == 2:
        config.vocab_size = table.shape[0]
    if hasattr(config, "head_dim") and not hasattr(config, "global_head_dim"):
        config.head_dim = _said(file, "attention.key_length") or config.head_dim
    if config.model_type in _WINDOWED:
        config.sliding_window = _said(file, "attention.sliding_window")
    for size, key in _SIZES.items():
        if hasattr(config, size):
            setattr(config, size, _said(file, key) or getattr(config, size))
    for token, key in _TOKENS.items():
        setattr(config, f"{token}_token_id", file.metadata.get(f"tokenizer.ggml.{key}_token_id"))
    for part, bias in {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_down.bias"}.items():
        if hasattr(config, part):
            setattr(config, part, any(name.endswith(bias) for name in file.tensors))
    if hasattr(config, "query_pre_attn_scalar"):
        large = (file.architecture, config.num_hidden_layers) in _LARGE_GEMMAS
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if large else config.head_dim
    if getattr(config, "rope_parameters", None):
        _correct_rope(config, file)
    return config


def end_token_ids(file: GgufFile) -> list[int] | None:
    """The end-of-sequence token ids."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    found = {file.metadata[key] for key in keys if isinstance(file.metadata.get(key), int)}
    return sorted(found) or None


def _said(file: GgufFile, key: str) -> Any:
    return file.metadata.get(f"{file.architecture}.{key}")


def _correct_rope(config: Any, file: GgufFile) -> None:
    layered = "full_attention" in config.rope_parameters
    rope = config.rope_parameters["full_attention"] if layered else config.rope_parameters
    rope["rope_theta"] = _said(file, "rope.freq_base") or rope["rope_theta"]
    if layered and (base := _said(file, "rope.freq_base_swa")):
        config.rope_parameters["sliding_attention"]["rope_theta"] = base
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dims = _said(file, "rope.dimension_count") or size
    if dims != size or "partial_rotary_factor" in rope:
        rope["partial_rotary_factor"] = dims / size
    rope.update(_scaling(file, rope["rope_theta"], dims))


def _scaling(file: GgufFile, theta: float, dims: int) -> dict[str, Any]:
    """RoPE scaling in transformers' format."""
    kind, factor = _said(file, "rope.scaling.type") or "none", _said(file, "rope.scaling.factor")
    if any(name.startswith("rope_factors_") for name in file.tensors):
        raise _refused(file, "LongRoPE factors, which only folders in transformers' form can be served with")
    if _FACTORS in file.tensors:
        return _llama3(file, theta, dims)
    if kind == "none" or not factor or factor == 1:
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise _refused(file, f"RoPE scaling of type {kind!r}")
    context = _said(file, "rope.scaling.original_context_length")
    return {"rope_type": "yarn", "factor": factor, **({"original_max_position_embeddings": context} if context else {})}


def _llama3(file: GgufFile, theta: float, dims: int) -> dict[str, Any]:
    """Parameters of Llama 3's RoPE scaling, if they reproduce the factors in the file."""
    tensor = file.tensors[_FACTORS]
    if tensor.type != GGMLQuantizationType.F32 or tensor.shape != (dims // 2,):
        raise _refused(file, f"RoPE factors of shape {tensor.shape}, not ({dims // 2},)")
    factors = file.blocks(tensor).numpy().view(np.float32)
    if np.all(factors == 1):
        return {}
    factor = float(factors.max())
    if not np.allclose(factors, _llama3_factors(theta, dims, factor), rtol=1e-4):
        raise _refused(file, "RoPE factors that are not those of Llama 3")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _llama3_factors(theta: float, dims: int, factor: float) -> np.ndarray[Any, Any]:
    """Factors on the RoPE wavelengths, [dims // 2]."""
    low, high, context = _LLAMA3.values()
    waves = 2 * math.pi * theta ** (np.arange(0, dims, 2) / dims)
    share = ((context / waves - low) / (high - low)).clip(0, 1)
    return np.asarray(1 / ((1 - share) / factor + share))


def _refused(file: GgufFile, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{file.path.name} has {what}; it would be served wrongly")
