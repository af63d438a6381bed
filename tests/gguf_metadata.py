"""Metadata of a model's GGUF file, as llama.cpp's converter writes them from its config."""

import math
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

WEIGHTED = ("glm4moe", "dots1", "deepseek2", "nemotron_h_moe")
SCORED = ("glm4moe", "dots1", "deepseek2", "lfm2moe")
"""Architectures whose files say how experts are weighted, and how they are scored."""


def metadata(arch: str, model: PreTrainedModel) -> dict[str, Any]:
    """All keys of an architecture without their prefix; those that a config has no value for are left out."""
    config = model.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": _field(config, "num_key_value_heads"),
        "embedding_scale": _field(config, "embedding_multiplier") if arch.startswith("granite") else None,
        "residual_scale": _field(config, "residual_multiplier"),
        "attention.scale": _field(config, "attention_multiplier"),
        "logit_scale": _field(config, "logits_scaling", "logit_scale"),
        "attn_logit_softcapping": _field(config, "attn_logit_softcapping"),
        "final_logit_softcapping": _field(config, "final_logit_softcapping"),
    }
    for name, fields in {"rms_epsilon": ("rms_norm_eps",), "epsilon": _EPSILONS}.items():
        name = "rms_epsilon" if arch.startswith("lfm2") else name
        found[f"attention.layer_norm_{name}"] = epsilon = _field(config, *fields)
        if epsilon:
            break
    found |= _heads(arch, config) | _rope(arch, config) | _sliding(arch, config, kinds)
    if any(".experts." in name for name in model.state_dict()):
        found |= _experts(arch, config)
    if arch in ("lfm2", "lfm2moe", "granitehybrid", "nemotron_h", "nemotron_h_moe"):
        attends = [kind == "full_attention" for kind in kinds]
        found["attention.head_count_kv"] = [found["attention.head_count_kv"] * each for each in attends]
    if arch.startswith("nemotron_h"):
        sizes = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
        found["feed_forward_length"] = [sizes.get(kind, 0) for kind in kinds]
    if arch.startswith("qwen3") and "linear_attention" in kinds:
        found |= {"full_attention_interval": kinds.index("full_attention") + 1}
        found |= {"rope.dimension_sections": [2, 1, 1, 0]}
    if arch in ("gemma3n", "gemma4"):
        found |= _gemma(arch, config)
    if arch.startswith("lfm2"):
        found["vocab_size"] = config.vocab_size
    if arch == "granitehybrid":
        found["expert_shared_feed_forward_length"] = config.shared_intermediate_size
    if arch == "stablelm":
        found["use_parallel_residual"] = config.use_parallel_residual
    return {name: value for name, value in (found | _mixer(config)).items() if value is not None}


_EPSILONS = ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon", "norm_eps")


def _field(config: Any, *names: str) -> Any:
    """The first of these fields that a config has; of Gemma 4, what layers have that are no exception."""
    values = config.to_dict()
    found = (values[name] if name in values else getattr(config, name, None) for name in names)
    return next((value for value in found if value is not None), None)


def _heads(arch: str, config: Any) -> dict[str, Any]:
    if arch == "deepseek2":
        sizes = {"key": config.qk_nope_head_dim + config.qk_rope_head_dim, "value": config.v_head_dim}
        return {f"attention.{name}_length{end}": size for name, size in sizes.items() for end in ("", "_mla")} | {
            "attention.head_count_kv": 1, "attention.kv_lora_rank": config.kv_lora_rank,
            "attention.q_lora_rank": config.q_lora_rank, "vocab_size": config.vocab_size,
        }  # fmt: skip
    size = _field(config, "head_dim") or config.hidden_size // config.num_attention_heads
    large = _largest_head(config)
    found = {f"attention.{name}_length": large or size for name in ("key", "value")}
    return found | ({f"attention.{name}_length_swa": size for name in ("key", "value")} if large else {})


def _exceptions(config: Any) -> dict[int, dict[str, int]]:
    """Sizes of layers that are not those of all."""
    return {int(layer): sizes for layer, sizes in (config.to_dict().get("per_layer_config") or {}).items()}


def _largest_head(config: Any) -> int:
    """Size of heads in layers that are exceptions; 0 if there are none."""
    return max((sizes["head_dim"] for sizes in _exceptions(config).values()), default=0)


def _rope(arch: str, config: Any) -> dict[str, Any]:
    ropes = _field(config, "rope_parameters") or {}
    main, local = ropes.get("full_attention", ropes), ropes.get("sliding_attention", {})
    size = _largest_head(config) or _field(config, "head_dim") or config.hidden_size // config.num_attention_heads
    kind, partial = main.get("rope_type", "default"), main.get("partial_rotary_factor") or 1
    found = {
        "rope.freq_base": main.get("rope_theta"),
        "rope.dimension_count": size if kind == "proportional" else int(size * partial),
        "rope.freq_base_swa": local.get("rope_theta") if arch.startswith("gemma") else None,
        "rope.dimension_count_swa": _field(config, "head_dim") if kind == "proportional" else None,
        "rope.scaling.finetuned": False if arch in ("granitehybrid", "nemotron_h", "nemotron_h_moe") else None,
    }
    if arch == "deepseek2":
        found["rope.dimension_count"] = config.qk_rope_head_dim
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": main["factor"]}
    if kind in ("yarn", "longrope"):
        found["rope.scaling.original_context_length"] = main["original_max_position_embeddings"]
    if share := main.get("mscale_all_dim"):
        found["rope.scaling.yarn_log_multiplier"] = share * (0.1 if arch == "deepseek2" else 1)
    if kind == "longrope":
        original = main["original_max_position_embeddings"]
        larger = config.max_position_embeddings / original
        found["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(larger) / math.log(original))
    return found | {"attention.temperature_scale": main.get("llama_4_scaling_beta")}


def rope_tables(model: PreTrainedModel) -> dict[str, list[float]]:
    """Factors of RoPE, by the names of their tensors."""
    config = model.config
    ropes = _field(config, "rope_parameters") or {}
    main = ropes.get("full_attention", ropes)
    kind = main.get("rope_type")
    if kind == "longrope":
        return {f"rope_factors_{name}": main[f"{name}_factor"] for name in ("short", "long")}
    if kind == "proportional":
        pairs = _largest_head(config) // 2
        turned = int(pairs * main["partial_rotary_factor"])
        return {"rope_freqs": [1.0] * turned + [1e30] * (pairs - turned)}
    if kind == "llama3":
        scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]
        plain = main["rope_theta"] ** (-torch.arange(len(scaled)) / len(scaled))
        return {"rope_freqs": (plain / scaled).tolist()}
    return {}


def _sliding(arch: str, config: Any, kinds: list[str]) -> dict[str, Any]:
    slides = [kind == "sliding_attention" for kind in kinds]
    if arch != "phi3" and not any(slides):
        return {}
    pattern = None if arch in ("phi3", "gemma2", "gemma3", "gpt-oss") else slides
    return {"attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": pattern}


def _experts(arch: str, config: Any) -> dict[str, Any]:
    size, shared = _field(config, "moe_intermediate_size"), _field(config, "n_shared_experts", "moe_num_shared_experts")
    found = {
        "expert_count": _field(config, "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
        "expert_used_count": _field(config, "moe_topk", "moe_k", "top_k_experts", "num_experts_per_tok"),
        "expert_feed_forward_length": size,
        "expert_shared_count": shared,
        "expert_shared_feed_forward_length": _field(config, "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size"),
        "leading_dense_block_count": _field(config, "first_k_dense_replace", "moe_layer_start_index",
            "num_dense_layers"),
        "interleave_moe_layer_step": _field(config, "moe_layer_interval"),
    }  # fmt: skip
    if arch in ("gpt-oss", "hunyuan-moe"):
        found["expert_feed_forward_length"] = config.intermediate_size
    if arch == "hunyuan-moe":
        found |= {"expert_shared_count": 1, "expert_shared_feed_forward_length": config.intermediate_size}
    elif arch == "ernie4_5-moe":
        found["expert_shared_feed_forward_length"] = shared * size
    if arch in WEIGHTED:
        greedy = config.model_type == "deepseek_v2"
        found |= {
            "expert_weights_norm": None if greedy else config.norm_topk_prob,
            "expert_weights_scale": config.routed_scaling_factor, "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
        }  # fmt: skip
    if arch in SCORED:
        found["expert_gating_func"] = 1 if config.model_type == "deepseek_v2" else 2
    return found


def _mixer(config: Any) -> dict[str, Any]:
    """Of recurrent layers."""
    heads = _field(config, "mamba_n_heads", "mamba_num_heads", "linear_num_value_heads")
    if heads is None:
        return {"shortconv.l_cache": _field(config, "conv_L_cache")}
    size = _field(config, "mamba_d_head", "mamba_head_dim", "linear_value_head_dim")
    return {
        "ssm.conv_kernel": _field(config, "mamba_d_conv", "conv_kernel", "linear_conv_kernel_dim"),
        "ssm.state_size": _field(config, "mamba_d_state", "ssm_state_size", "linear_key_head_dim"),
        "ssm.group_count": _field(config, "mamba_n_groups", "n_groups", "linear_num_key_heads"),
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * size,
    }


def _gemma(arch: str, config: Any) -> dict[str, Any]:
    found = {
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
    }
    if arch == "gemma3n":
        shares = torch.tensor(config.activation_sparsity_pattern, dtype=torch.float64)
        return found | {
            "altup.num_inputs": config.altup_num_inputs, "altup.active_idx": config.altup_active_idx,
            "activation_sparsity_scale": torch.special.ndtri(shares).tolist(),
        }  # fmt: skip
    layers, shared = config.num_hidden_layers, config.num_kv_shared_layers
    if config.use_double_wide_mlp:
        size = config.intermediate_size
        found["feed_forward_length"] = [size] * (layers - shared) + [2 * size] * shared
    if config.attention_k_eq_v:
        exceptions, heads = _exceptions(config), _field(config, "num_key_value_heads")
        found["attention.head_count_kv"] = [
            exceptions.get(layer, {}).get("num_key_value_heads", heads) for layer in range(layers)
        ]
    return found
