"""A tiny random model of every entry of transformers' causal-LM map, made by shrinking the entry's own config."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_WIDE = 96
"""Sliding window of models whose layers all slide: longer than any test's text."""

_MOST_PARAMETERS = 3_000_000

_SIZES: dict[Any, str] = {
    64: "vocab_size decoder_vocab_size vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size",
    32: """hidden_size d_model n_embd embedding_size intermediate_size d_ff dff ffn_dim dim_ff decoder_ffn_dim
        encoder_ffn_dim moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size
        shared_experts_intermediate_size ffn_hidden_size word_embed_proj_dim emb_dim d_inner lru_width
        expert_ffn_hidden_size attention_hidden_size intermediate_size_mlp dense_intermediate_size embedding_dim
        feed_forward_size moe_shared_expert_intermediate_size n_inner input_embedding_size output_embedding_size
        mamba_d_ssm moe_latent_size backbone_hidden_size pronunciation_embed_dim shape_embed_dim""",
    8: """head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim global_head_dim swa_head_dim swa_v_head_dim
        attention_head_dim kv_channels attention_head_size d_head d_kv dim_head index_head_dim linear_key_head_dim
        linear_value_head_dim linear_head_dim mamba_d_head mamba_headdim mamba_head_dim q_lora_rank kv_lora_rank
        o_lora_rank hidden_size_per_layer_input laurel_rank rotary_dim query_pre_attn_scalar hc_lowrank
        gated_norm_rank router_hidden_size adapter_rank mamba_d_state ssm_state_size state_size time_step_rank
        mamba_dt_rank d_rel""",
    4: """num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads num_heads
        num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads linear_num_value_heads
        linear_num_heads mamba_n_heads mamba_num_heads attention_heads num_experts n_routed_experts num_local_experts
        moe_num_experts index_n_heads""",
    2: """num_key_value_heads num_kv_heads num_global_key_value_heads swa_num_key_value_heads linear_num_key_heads
        num_query_groups moe_topk num_experts_per_tok eos_token_id""",
    1: "n_group topk_group bos_token_id",
    0: "pad_token_id",
    128: """max_position_embeddings n_positions n_ctx model_max_length max_seq_len max_target_positions
        context_length""",
    16: "sliding_window sliding_window_size attention_window_size local_attention index_topk qk_head_dim",
    0.3: "initializer_range init_std",
}
"""Sizes of a tiny model, and the config settings set to them wherever they occur."""

_LAYERS = [
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_decoder_layers",
    "num_encoder_layers", "num_blocks",
]  # fmt: skip

_TINY: dict[str, Any] = {name: size for size, names in _SIZES.items() for name in names.split()}
_TINY |= dict.fromkeys(_LAYERS, 2)

_MAMBA = {"mamba_expand": 1, "mamba_n_groups": 1, "mamba_n_heads": 4, "mamba_d_head": 8}
_SHARED = {
    "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4, "num_key_value_heads": 4,
    "attention_hidden_size": 64, "attention_head_dim": 16, "mamba_expand": 1,
}  # fmt: skip
_FEW = {"n_group": 1, "num_group": 1, "num_experts_per_token": 2, "num_experts_per_tok": 2}

_SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _FEW,
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4},
    "emu3": {"pad_token_id": 0},
    "ernie4_5_moe": {"moe_k": 2},
    "gemma3n_text": {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [32] * 4},
    "granitemoehybrid": _MAMBA | {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _FEW,
    "lfm2": {"layer_types": ["full_attention", "conv"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    "mamba2": {"expand": 1, "n_groups": 1},
    "minimax": {"sliding_window": None},
    "nemotron_h": {"n_groups": 1, "mamba_n_groups": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": _WIDE},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16]},
    "xmod": {"default_language": "en_XX"},
    "zamba": _SHARED,
    "zamba2": _SHARED | {"initializer_range": 0.1, "n_mamba_heads": 4, "mamba_headdim": 8, "kv_channels": 8,
        "num_query_groups": 4},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""Settings of single entries."""

NOT_BUILT = {
    "blt", "cohere_compass_text", "dbrx", "dots3_note", "dots3_note_text", "gemma3n", "gemma4_assistant",
    "gemma4_unified_assistant", "musicgen", "musicgen_melody", "qwen4_exp", "qwen4_exp_text",
}  # fmt: skip
"""Entries whose configs cannot be shrunk this way, or that need packages that are not installed."""

ENTRIES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - NOT_BUILT)


def make(entry: str) -> PreTrainedModel:
    """A tiny random model of an entry of the map.

    Raises:
        ValueError: the model is not tiny.
    """
    torch.manual_seed(0)
    config = CONFIG_MAPPING[entry]
    config = config(**_shrunk(config().to_dict(), _SPECIAL.get(entry, {})))
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kind = kind[0] if isinstance(kind, tuple) else kind
    if not isinstance(config, kind.config_class):
        config = config.get_text_config(decoder=True)
    with torch.device("meta"):
        count = sum(weight.numel() for weight in kind(config).parameters())
    if count > _MOST_PARAMETERS:
        raise ValueError(f"{entry} has {count} parameters; add what makes it large to the sizes")
    model = kind(config).eval()
    for weight in model.parameters():
        if not weight.any():  # what starts as zero would hide what it does
            weight.data.normal_(0, 0.3)
    return model


def logits_of(model: PreTrainedModel, ids: Tensor, **more: Any) -> Tensor:
    """Logits [B, n, V], with masked tokens' logits set to zero so that errors stay finite."""
    logits: Tensor = model(ids, **more).logits.float()
    return logits.masked_fill(logits.abs() > 1e30, 0.0)


def _shrunk(defaults: dict[str, Any], special: dict[str, Any]) -> dict[str, Any]:
    """Settings that make a config with these defaults tiny, one layer of every kind included."""
    settings = {name: _TINY[name] for name in defaults if name in _TINY}
    if not any("full" in str(kind) for kind in defaults.get("layer_types") or ()):
        settings |= {name: _WIDE for name in settings if name.startswith("sliding_window")}
    if "kv_lora_rank" in defaults and "num_key_value_heads" in settings:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    layers = next((defaults[name] for name in _LAYERS if isinstance(defaults.get(name), int)), None)
    by_layer = {name: value for name, value in defaults.items() if isinstance(value, list) and len(value) == layers}
    if by_layer:
        first: dict[str, int] = {}
        for number, kinds in enumerate(zip(*by_layer.values(), strict=True)):
            first.setdefault(str(kinds), number)
        chosen = list(first.values())[:4] * (2 if len(first) == 1 else 1)
        settings |= {name: [value[number] for number in chosen] for name, value in by_layer.items()}
        settings |= {name: len(chosen) for name in _LAYERS if name in defaults}
    if "cross_attention_layers" in defaults:
        settings["cross_attention_layers"] = [1]
    for name, value in defaults.items():
        if name.endswith("_config") and isinstance(value, dict) and value:
            kind = {"model_type": value["model_type"]} if "model_type" in value else {}
            settings[name] = _shrunk(value, {}) | kind
    return settings | special
