"""Families whose GGUF files transformers' own reader does not know: their configs, and names and order of weights.

The weights' names are those of the gguf package, which llama.cpp's converter uses, besides what is listed here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_gguf_pytorch_utils import GGUFTensor, LlamaTensorProcessor, Qwen2MoeTensorProcessor

from h2o_stream.models import gguf_gemma, gguf_hybrids, gguf_latent
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.gguf_header import GgufTensor

_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
}
"""Attributes of configs by keys of files, without the architecture."""

_SHARED = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_ERNIE = {
    "expert_count": "moe_num_experts",
    "expert_used_count": "moe_k",
    "expert_shared_count": "moe_num_shared_experts",
    "leading_dense_block_count": "moe_layer_start_index",
    "interleave_moe_layer_step": "moe_layer_interval",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_LATENT = {"attention.kv_lora_rank": "kv_lora_rank"}
_GRANITE = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
_QWEN_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_NEMOTRON = {
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
}
_GEMMA_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_LFM2_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "leading_dense_block_count": "num_dense_layers",
}
_LOCAL = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}


@dataclass(frozen=True)
class Family:
    """How transformers calls what a file says.

    Attributes:
        model_type: of transformers.
        keys: attributes of the config by keys of files, besides those of all families.
        fixed: attributes that no key says.
        permuted: rows of queries and keys are in the order of RoPE by adjacent pairs.
        norm_offset: is added to the weights of norms in files.
        full_every: every so many layers one sees everything where others have a sliding window.
        derived: further attributes of the config, of a file's keys and names of tensors.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    permuted: bool = False
    norm_offset: float = 0.0
    full_every: int = 0
    derived: Callable[[gguf_hybrids.Get, Mapping[str, GgufTensor]], dict[str, Any]] | None = None


FAMILIES = {
    "smollm3": Family("smollm3", permuted=True),
    "arcee": Family("arcee", permuted=True),
    "llama with experts": Family("mixtral", _LOCAL, permuted=True),
    "mistral3": Family("mistral", fixed={"sliding_window": None}, permuted=True),
    "mistral3 with temperatures": Family("ministral3", fixed={"sliding_window": None}, permuted=True),
    "olmo2": Family("olmo2"),
    "olmo2 with sliding layers": Family("olmo3", full_every=4),
    "olmoe": Family("olmoe", {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}),
    "exaone4": Family("exaone4", full_every=4, fixed={"sliding_window": None}),
    "seed_oss": Family("seed_oss"),
    "chatglm": Family("glm"),
    "glm4": Family("glm4"),
    "glm4moe": Family("glm4_moe", _SHARED),
    "deepseek2": Family("deepseek_v2", _SHARED | _LATENT, derived=gguf_latent.config),
    "deepseek2 by sigmoid": Family(
        "deepseek_v3", _SHARED | _LATENT, {"norm_topk_prob": False}, derived=gguf_latent.config
    ),
    "dots1": Family("dots1", _SHARED, {"sliding_window": None}),
    "ernie4_5": Family("ernie4_5"),
    "ernie4_5-moe": Family("ernie4_5_moe", _ERNIE),
    "hunyuan-dense": Family("hunyuan_v1_dense"),
    "hunyuan-moe": Family("hunyuan_v1_moe", {"expert_count": "num_experts", "expert_used_count": "moe_topk"}),
    "granite": Family("granite", _GRANITE, permuted=True),
    "granitemoe": Family("granitemoe", _GRANITE | _LOCAL, permuted=True),
    "granitehybrid": Family("granitemoehybrid", _GRANITE, permuted=True, derived=gguf_hybrids.granite_config),
    "qwen35": Family("qwen3_5_text", norm_offset=1.0, derived=gguf_hybrids.qwen_config),
    "qwen35moe": Family("qwen3_5_moe_text", _QWEN_EXPERTS, norm_offset=1.0, derived=gguf_hybrids.qwen_config),
    "qwen3next": Family("qwen3_next", _QWEN_EXPERTS, norm_offset=1.0, derived=gguf_hybrids.qwen_config),
    "falcon-h1": Family("falcon_h1", derived=gguf_hybrids.falcon_config),
    "nemotron_h": Family("nemotron_h", _NEMOTRON, derived=gguf_hybrids.nemotron_config),
    "nemotron_h_moe": Family("nemotron_h", _NEMOTRON | _SHARED, derived=gguf_hybrids.nemotron_config),
    "lfm2moe": Family("lfm2_moe", _LFM2_EXPERTS, derived=gguf_hybrids.convolution_config),
    "command-r": Family("cohere", {"logit_scale": "logit_scale"}),
    "cohere2": Family("cohere2", {"logit_scale": "logit_scale"}, full_every=4),
    "gemma3n": Family("gemma3n_text", derived=gguf_gemma.config_3n),
    "gemma4": Family("gemma4_text", derived=gguf_gemma.config),
    "gemma4 with experts": Family("gemma4_text", _GEMMA_EXPERTS, {"enable_moe_block": True}, derived=gguf_gemma.config),
    "gemma": Family("gemma", norm_offset=1.0),
}
"""By llama.cpp's name of the architecture, and what else tells families apart."""

_EXPERTS = {
    f"{block}.experts.{name}": tensors
    for block in ("mlp", "block_sparse_moe")
    for name, tensors in {
        "gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
        "down_proj": ("ffn_down_exps",),
        **{f"{part}_proj.weight": (f"ffn_{part}_exps.weight",) for part in ("gate", "up", "down")},
    }.items()
}
_NAMES: Mapping[str, tuple[str, ...]] = {
    **_EXPERTS,
    **gguf_hybrids.NAMES,
    "mlp.gate.e_score_correction_bias": ("exp_probs_b.bias",),
    "mlp.gate.moe_statics.e_score_correction_bias": ("exp_probs_b.bias",),
    "block_sparse_moe.router.weight": ("ffn_gate_inp.weight",),
    "router.scale": ("ffn_gate_inp.scale",),
    "router.per_expert_scale": ("ffn_down_exps.scale",),
}
"""Tensors of a layer in files by weights in transformers, where the gguf package does not know them."""

_OUTSIDE: Mapping[str, str] = {**gguf_hybrids.OUTSIDE, **gguf_gemma.OUTSIDE}
"""The same outside of layers."""

_BY_SIGMOID = 2
"""llama.cpp's number of the function of a router's logits."""


def family_of(file: GgufFile) -> Family | None:
    """The family of a file, if transformers' reader does not know it."""
    name = file.architecture
    further = {
        "expert_count": "with experts",
        "attention.sliding_window": "with sliding layers",
        "attention.temperature_scale": "with temperatures",
    }
    kinds = [what for key, what in further.items() if file.metadata.get(f"{name}.{key}")]
    if file.metadata.get(f"{name}.expert_gating_func") == _BY_SIGMOID:
        kinds.append("by sigmoid")
    found = (FAMILIES.get(f"{name} {what}") for what in kinds)
    return next(filter(None, found), FAMILIES.get(name))


def config_of(file: GgufFile, family: Family) -> PretrainedConfig:
    """The config of a file of this family, without RoPE (`gguf_config`)."""

    def get(key: str) -> Any:
        return file.metadata.get(f"{file.architecture}.{key}")

    layers = gguf_hybrids.layer_count(get)
    keys = {**_KEYS, **family.keys}
    values = {attribute: get(key) for key, attribute in keys.items() if get(key) is not None}
    if every := family.full_every:
        slides = get("attention.sliding_window_pattern")
        if not isinstance(slides, list):
            slides = [bool(values.get("sliding_window")) and (number + 1) % every != 0 for number in range(layers)]
        values["layer_types"] = ["sliding_attention" if slide else "full_attention" for slide in slides[:layers]]
    if family.derived:
        values |= family.derived(get, file.tensors)
    tied = "output.weight" not in file.tensors
    return AutoConfig.for_model(
        family.model_type, **{**family.fixed, **values}, num_hidden_layers=layers, tie_word_embeddings=tied
    )


class FamilyProcessor(Qwen2MoeTensorProcessor):
    """What transformers' reader asks for names and values of weights; see its `TensorProcessor`."""

    def __init__(self, family: Family, config: Mapping[str, Any]) -> None:
        super().__init__(config=config)
        self._config = config
        self._family, self._unpermuted = family, LlamaTensorProcessor(config=config)

    def preprocess_name(self, hf_name: str) -> str:
        """The name for the gguf package."""
        return hf_name

    def perform_fallback_tensor_mapping(
        self, gguf_to_hf_name_map: dict[str, str], suffix: str, qual_name: str, hf_name: str
    ) -> None:
        """Add the tensors of a weight that the gguf package does not know."""
        if layer := re.fullmatch(r"(?:model\.)?layers\.(\d+)\.(.+)", hf_name):
            for name in _NAMES.get(layer[2], ()):
                gguf_to_hf_name_map[f"blk.{layer[1]}.{name}"] = qual_name + hf_name
        elif hf_name in _OUTSIDE:
            gguf_to_hf_name_map[_OUTSIDE[hf_name]] = qual_name + hf_name

    def process(self, weights: np.ndarray[Any, Any], name: str, **kwargs: Any) -> GGUFTensor:
        """Revert what the converter has done to a tensor."""
        if gguf_latent.is_part(name):
            tensors, whole = kwargs["parsed_parameters"]["tensors"], kwargs["tensor_key_mapping"][name]
            gguf_latent.put_part(tensors, whole, weights, name)
            return GGUFTensor(weights, None, {})
        if self._family.derived:
            weights = gguf_hybrids.as_in_transformers(weights, name, self._config)
        mapping = kwargs.get("tensor_key_mapping") or {}
        if mapping.get(name.removesuffix(".weight"), "").endswith("experts.up_proj"):  # without gates
            return GGUFTensor(weights, name, {})
        if "ffn_gate_inp_shexp" in name and weights.ndim > 1:  # one row, or a vector
            return GGUFTensor(weights, name, {})
        if self._family.norm_offset and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
            return GGUFTensor(weights - self._family.norm_offset, name, {})
        if self._family.permuted and re.search(r"attn_[qk]\.", name):
            return self._unpermuted.process(weights, name, **kwargs)
        return super().process(weights, name, **kwargs)
