"""Corrects the config that transformers derives from GGUF metadata, where errors would silently change the output.

Covers RoPE frequencies and scaling, head sizes, biases, and scales that llama.cpp infers from the model's size.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from h2o_stream.errors import UnsupportedModelError
from h2o_stream.models.gguf import UNROTATED, GgufFile
from h2o_stream.native.gguf_types import TensorType

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
    "attention.key_length_swa",
    "attention.value_length_swa",
    "rope.dimension_count_swa",
)
_OPTIONAL_DIMENSIONS = (
    "attention.key_length_mla",
    "attention.value_length_mla",
    "attention.kv_lora_rank",
    "attention.q_lora_rank",
    "embedding_length_per_layer_input",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
)

_CONFIG_SIZES = {
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_TOKEN_KEYS = {"bos": "bos", "eos": "eos", "pad": "padding"}

_FLAGS = {
    "attention_bias": "attn_q.bias",
    "attention_out_bias": "attn_output.bias",
    "mlp_bias": "ffn_down.bias",
    "use_bias": "attn_output.bias",
    "use_qk_norm": "attn_q_norm.weight",
}
"""Attributes of configs that say whether a model has such weights."""

_WITH_SLIDING_WINDOW = ("mistral", "phi3", "gpt_oss")
"""Architectures for which transformers ignores the file's sliding window."""

_WITH_LOCAL_ROPE = ("gemma3_text", "gemma3n_text")
"""Architectures whose sliding layers have RoPE of another base, if the file does not say."""

_ROPE_FACTORS, _SHORT_FACTORS = "rope_freqs.weight", "rope_factors_short.weight"
_POSITIVE = (
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)
_YARN_DEFAULTS = {"yarn_ext_factor": 1, "yarn_attn_factor": 1, "yarn_log_multiplier": 0}
"""Parameters of YaRN that transformers has only at these values."""
_LARGE_GEMMAS = {("gemma2", 46), ("gemma3", 62)}
"""Architecture and number of layers of the 27B models, which scale queries by hidden_size / num_attention_heads."""


def check_sizes(file: GgufFile) -> None:
    """Check that sizes in the metadata are consistent with the tensors, before allocating anything.

    Raises:
        ModelNotFoundError: a size is 0 that must not be, or larger than any dimension of the tensors, or layers are
            missing or too many.
    """
    largest_dim = max((size for tensor in file.tensors.values() for size in tensor.shape), default=0)
    for key in ("block_count", *_DIMENSIONS, *_OPTIONAL_DIMENSIONS):
        limit = len(file.tensors) if key == "block_count" else largest_dim
        value = _read_metadata(file, key)
        optional = isinstance(value, list) or key in _OPTIONAL_DIMENSIONS or key.startswith("expert_")
        for size in value if isinstance(value, list) else [] if value is None else [value]:
            least = 0 if optional else 1  # no experts, or none in a layer
            if type(size) is not int or not least <= size <= limit:
                raise file.damaged(f"{file.architecture}.{key} is {size!r}, not a number from 1 to {limit}")
    layers = {int(name.split(".")[1]) for name in file.tensors if re.match(r"blk\.\d+\.", name)}
    count, guessing = (_read_metadata(file, key) or 0 for key in ("block_count", "nextn_predict_layers"))
    if type(count) is not int or type(guessing) is not int:
        raise file.damaged(f"it has {count!r} layers, of which {guessing!r} guess tokens")
    if count and layers and not count - guessing <= max(layers) + 1 <= count:
        raise file.damaged(f"{file.architecture}.block_count is {count}, and it has {max(layers) + 1} layers")


def check_rope(file: GgufFile) -> None:
    """Check the numbers of RoPE in the metadata.

    Raises:
        ModelNotFoundError: one is not a positive number; only the scaling factor may be 0, for none.
    """
    for key in (*_POSITIVE, "rope.scaling.factor"):
        value = _read_metadata(file, key)
        if value is None or (key == "rope.scaling.factor" and value == 0):
            continue
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise file.damaged(f"{file.architecture}.{key} is {value!r}, not a positive number")
    for end in ("", "_swa"):
        size = _read_metadata(file, f"attention.key_length{end}")
        heads, hidden = (_read_metadata(file, key) for key in ("attention.head_count", "embedding_length"))
        if size is None and not end and type(heads) is int and type(hidden) is int:
            size = hidden // heads
        dims = _read_metadata(file, f"rope.dimension_count{end}")
        if type(dims) is int and type(size) is int and dims > size:
            reason = f"{file.architecture}.rope.dimension_count{end} is {dims}, more than the {size} numbers of a head"
            raise file.damaged(reason)


def correct_config(config: Any, file: GgufFile) -> Any:
    """Correct a config made by transformers with the file's metadata.

    Raises:
        UnsupportedModelError: transformers has no equivalent of the file's RoPE scaling.
    """
    embedding = file.tensors.get("token_embd.weight")
    if embedding and len(embedding.shape) == 2:
        config.vocab_size = embedding.shape[0]
    own_sizes = _has_sizes_by_layer(config) or hasattr(config, "kv_lora_rank")
    if not own_sizes and hasattr(config, "head_dim"):
        config.head_dim = _read_metadata(file, "attention.key_length") or config.head_dim
    if config.model_type in _WITH_SLIDING_WINDOW:
        config.sliding_window = _read_metadata(file, "attention.sliding_window")
    for size, key in _CONFIG_SIZES.items():
        if hasattr(config, size):
            setattr(config, size, _read_metadata(file, key) or getattr(config, size))
    for token, key in _TOKEN_KEYS.items():
        setattr(config, f"{token}_token_id", file.metadata.get(f"tokenizer.ggml.{key}_token_id"))
    for attribute, end in _FLAGS.items():
        if hasattr(config, attribute):
            setattr(config, attribute, any(name.endswith(end) for name in file.tensors))
    if hasattr(config, "query_pre_attn_scalar"):
        is_large = (file.architecture, config.num_hidden_layers) in _LARGE_GEMMAS
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if is_large else config.head_dim
    if getattr(config, "rope_parameters", None):
        _correct_rope(config, file)
    return config


def _has_sizes_by_layer(config: Any) -> bool:
    return str(config.model_type) == "gemma4_text"


def end_token_ids(file: GgufFile) -> list[int] | None:
    """The end-of-sequence token ids."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    token_ids = {file.metadata[key] for key in keys if isinstance(file.metadata.get(key), int)}
    return sorted(token_ids) or None


def _read_metadata(file: GgufFile, key: str) -> Any:
    return file.metadata.get(f"{file.architecture}.{key}")


def _correct_rope(config: Any, file: GgufFile) -> None:
    per_layer_type = "full_attention" in config.rope_parameters
    rope = config.rope_parameters["full_attention"] if per_layer_type else config.rope_parameters
    rope["rope_theta"] = _read_metadata(file, "rope.freq_base") or rope["rope_theta"]
    own = config.model_type in _WITH_LOCAL_ROPE
    if per_layer_type and (base := _read_metadata(file, "rope.freq_base_swa") or (not own and rope["rope_theta"])):
        config.rope_parameters["sliding_attention"]["rope_theta"] = base
    if _has_sizes_by_layer(config):
        rope.update(_proportional(file))
        return
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dims = _read_metadata(file, "rope.dimension_count") or size
    if dims != size or "partial_rotary_factor" in rope:
        rope["partial_rotary_factor"] = dims / size
    rope.update({"rope_type": "default"} | _scaling(file, rope["rope_theta"], dims))


def _scaling(file: GgufFile, theta: float, dims: int) -> dict[str, Any]:
    """RoPE scaling in transformers' format."""
    kind, factor = _read_metadata(file, "rope.scaling.type") or "none", _read_metadata(file, "rope.scaling.factor")
    if _SHORT_FACTORS in file.tensors:
        return _longrope(file, dims)
    if kind != "yarn" and (attention := _read_metadata(file, "rope.scaling.attn_factor") or 1) != 1:
        raise _unsupported(file, f"rope.scaling.attn_factor {attention} without YaRN")
    if _ROPE_FACTORS in file.tensors:
        return _llama3(file, theta, dims)
    if kind not in ("none", "linear", "yarn"):
        raise _unsupported(file, f"RoPE scaling of type {kind!r}")
    if kind == "none" or not factor or factor == 1:
        return {}
    return _yarn(file, factor) if kind == "yarn" else {"rope_type": "linear", "factor": factor}


def _longrope(file: GgufFile, dims: int) -> dict[str, Any]:
    """Parameters of LongRoPE from the tables of factors."""
    context = _read_metadata(file, "rope.scaling.original_context_length")
    if type(context) is not int:
        raise _unsupported(file, f"LongRoPE factors for an original context of {context!r}")
    found = {name: _factors(file, f"rope_factors_{name}.weight", dims).tolist() for name in ("short", "long")}
    return {
        "rope_type": "longrope",
        "short_factor": found["short"],
        "long_factor": found["long"],
        "original_max_position_embeddings": context,
        "attention_factor": _read_metadata(file, "rope.scaling.attn_factor") or 1.0,
    }


def _factors(file: GgufFile, name: str, dims: int) -> np.ndarray[Any, Any]:
    """A table of factors on RoPE, [dims // 2]."""
    tensor = file.tensors.get(name)
    if tensor is None or tensor.type != TensorType.F32 or tensor.shape != (dims // 2,):
        raise _unsupported(file, f"RoPE factors of shape {tensor and tensor.shape}, not ({dims // 2},)")
    return file.blocks(tensor).view(np.float32)


def _yarn(file: GgufFile, factor: float) -> dict[str, Any]:
    """Parameters of YaRN. The file's attention factor is on top of what follows from the scaling factor."""
    temperature = _read_metadata(file, "attention.temperature_scale")
    latent = _read_metadata(file, "attention.kv_lora_rank")
    share = _read_metadata(file, "rope.scaling.yarn_log_multiplier")
    for name, default in _YARN_DEFAULTS.items():
        if (temperature or latent) and name == "yarn_log_multiplier":
            continue
        if (value := _read_metadata(file, f"rope.scaling.{name}")) not in (None, default):
            raise _unsupported(file, f"rope.scaling.{name} {value!r}, not {default}")
    found = {
        "original_max_position_embeddings": _read_metadata(file, "rope.scaling.original_context_length"),
        "beta_fast": _read_metadata(file, "rope.scaling.yarn_beta_fast"),
        "beta_slow": _read_metadata(file, "rope.scaling.yarn_beta_slow"),
    }
    if (attention := _read_metadata(file, "rope.scaling.attn_factor") or 1) != 1:
        found["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
    if temperature:  # of Ministral 3
        found["llama_4_scaling_beta"] = temperature
        found["mscale"], found["mscale_all_dim"] = 1.0, share
    if latent and share:  # its converter multiplies it by 0.1
        found["mscale"] = found["mscale_all_dim"] = share / 0.1
    return {"rope_type": "yarn", "factor": factor} | {name: value for name, value in found.items() if value}


def _proportional(file: GgufFile) -> dict[str, Any]:
    """Parameters of RoPE that leaves the slowest pairs of elements as they are, from the factors in the file."""
    dims = _read_metadata(file, "attention.key_length")
    factors = _factors(file, _ROPE_FACTORS, dims)
    rotated = int((factors == 1).sum())
    if not (np.all(factors[:rotated] == 1) and np.all(factors[rotated:] >= UNROTATED)):
        raise _unsupported(file, "RoPE factors that are neither 1 nor stand for no rotation")
    return {"rope_type": "proportional", "partial_rotary_factor": 2 * rotated / dims}


def _llama3(file: GgufFile, theta: float, dims: int) -> dict[str, Any]:
    """Parameters of Llama 3's RoPE scaling, if they reproduce the factors in the file."""
    factors = _factors(file, _ROPE_FACTORS, dims)
    if np.all(factors == 1):
        return {}
    factor = float(factors.max())
    if not np.allclose(factors, _llama3_factors(theta, dims, factor), rtol=1e-4):
        raise _unsupported(file, "RoPE factors that differ from Llama 3's")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _llama3_factors(theta: float, dims: int, factor: float) -> np.ndarray[Any, Any]:
    """Factors on the RoPE wavelengths, [dims // 2]."""
    low, high, context = _LLAMA3.values()
    wavelengths = 2 * math.pi * theta ** (np.arange(0, dims, 2) / dims)
    smooth = ((context / wavelengths - low) / (high - low)).clip(0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))


def _unsupported(file: GgufFile, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{file.path.name} has {what}; its output would be wrong")
