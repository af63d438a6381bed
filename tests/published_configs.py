"""What published config classes say of entries that a config leaves out, and older names of entries.

python -m tests.published_configs > h2o_stream/runtime/families/published.json
"""

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING

from h2o_stream.runtime import config_parameters
from h2o_stream.runtime.config_parameters import Entries
from h2o_stream.runtime.families import MODEL_TYPES

SMALL_CONFIGS = {"deepseek_v2": {"num_experts_per_tok": 6}, "glm4_moe": {"head_dim": 128}}
"""What the defaults of published classes do not have, or not in a form that runs."""

OLDER: dict[str, list[Any]] = {
    "rope_scaling": [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, {"type": "yarn", "factor": 4.0},
        {"type": "linear", "factor": 2.0}, {"type": "dynamic", "factor": 2.0}, {"rope_type": "default"}, None,
        {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
         "original_max_position_embeddings": 64},
    ],
    "rotary_pct": [0.5, 1.0], "rotary_emb_base": [5000.0], "rope_theta": [5000.0], "rope_local_base_freq": [5000.0],
    "partial_rotary_factor": [0.5, 1.0], "rotary_dim": [4], "original_max_position_embeddings": [64],
    "sliding_window": [None, 8], "sliding_window_pattern": [2], "use_sliding_window": [True, False],
    "hidden_act": ["gelu", "relu", "gelu_new"], "hidden_activation": ["gelu", None], "full_attn_idxs": [[1]],
    "no_rope_layer_interval": [2], "full_attention_interval": [2], "layer_types": [None], "head_dim": [None],
    "num_key_value_heads": [None], "norm_topk_prob": [True, False], "topk_method": ["greedy", "noaux_tc"],
    "first_k_dense_replace": [0, 1], "rope_interleave": [True, False], "use_qk_norm": [True, False],
    "mamba_d_head": ["auto"], "mlp_type": ["default"], "query_pre_attn_scalar": [64], "clip_qkv": [4.0],
    "use_parallel_residual": [True, False], "position_embedding_type": ["rope", "nope"],
}  # fmt: skip
"""Entries of configs as they were published, also where a newer class turns them into others."""

IGNORED = {
    ("bamba", "partial_rotary_factor"), ("cohere2_moe", "rope_scaling"), ("gpt_neox", "partial_rotary_factor"),
    ("gpt_neox", "rope_theta"), ("minimax_m3_vl_text", "partial_rotary_factor"),
}  # fmt: skip
"""What classes overlook, and no published config says."""

_OF_ROPE = {
    "rotary_pct", "rotary_emb_base", "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "rotary_dim",
    "rope_scaling", "original_max_position_embeddings",
}  # fmt: skip

_TEXT = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Gemma 3, of which most is left out": {
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {**_TEXT, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    },
    "Phi 4, trained for shorter texts than it reads": {
        "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_size": 3072, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "num_attention_heads": 24,
        "num_key_value_heads": 8, "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-5, "sliding_window": 262144,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    },
}  # fmt: skip

_BY_CODE = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
"""Entries that classes turn into `rope_parameters`."""


def default_config(name: str) -> dict[str, Any]:
    """The config of a type of models that says nothing itself."""
    config: dict[str, Any] = CONFIG_MAPPING[name]().to_dict()
    return config | {"architectures": ["XForCausalLM"]} | SMALL_CONFIGS.get(name, {})


def older_configs(name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Configs of a type as they were published, and as its class reads each."""
    whole, made = default_config(name), CONFIG_MAPPING[name]
    renamed, source = getattr(made, "attribute_map", {}), inspect.getsource(made)
    doubled = {old: [2 * whole[new]] for old, new in renamed.items() if type(whole.get(new)) is int}
    known = {entry for entry in OLDER if entry in source} | {"rope_scaling", "rope_theta"}
    for entry, values in (OLDER | doubled).items():
        if entry not in known | doubled.keys() or (name, entry) in IGNORED:
            continue
        left_out = {"rope_parameters"} if entry in _OF_ROPE else {renamed.get(entry)}
        for value in values:
            config = {key: item for key, item in whole.items() if key not in left_out} | {entry: value}
            with suppress(Exception):  # the class refuses it
                yield config, as_read(config)


def as_read(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as the published class has it."""
    read: dict[str, Any] = CONFIG_MAPPING[config["model_type"]](**{**config, "model_type": None}).to_dict()
    return {**read, "model_type": config["model_type"], "architectures": config["architectures"]}


def recorded(kind: type[dict[str, Any]]) -> tuple[Any, set[str]]:
    """A class of dictionaries, and the names that are read from any of them."""
    read = set[str]()

    class Recorded(kind):  # type: ignore[misc, valid-type]
        def get(self, name: str, otherwise: Any = None) -> Any:
            read.add(name)
            return super().get(name, otherwise)

        def __getitem__(self, name: str) -> Any:
            read.add(name)
            return super().__getitem__(name)

    return Recorded, read


def entries_read() -> set[str]:
    """The names of all entries that are looked at, for any type."""
    entries, read = recorded(Entries)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_parameters, "Entries", entries)
        for name in MODEL_TYPES:
            config_parameters.parameters_of_config(default_config(name))
    return read


def published() -> dict[str, Any]:
    """By type: the defaults of its class, and the newer names of older entries."""
    read, types = entries_read(), {}
    for name in sorted(MODEL_TYPES):
        made = CONFIG_MAPPING[name]
        renamed = {old: new for old, new in getattr(made, "attribute_map", {}).items() if new in read}
        values = {renamed.get(entry, entry): getattr(made, entry, None) for entry in sorted(read - _BY_CODE)}
        defaults = {entry: value for entry, value in values.items() if isinstance(value, int | float)}
        rope = default_config(name).get("rope_parameters") or {}
        theta, share = (rope.get(entry) for entry in ("rope_theta", "partial_rotary_factor"))
        plain = rope == {
            "rope_type": "default",
            "rope_theta": theta,
            **({} if share is None else {"partial_rotary_factor": share}),
        }
        if rope:
            defaults["rope_theta"] = theta if plain else None
        if plain and share is not None:
            defaults["partial_rotary_factor"] = share
        types[name] = {"defaults": defaults, "renamed": renamed}
    return {"transformers": transformers.__version__, **types}


if __name__ == "__main__":
    rows = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in published().items())
    print("{\n" + ",\n".join(rows) + "\n}")
