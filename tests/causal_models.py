"""Tiny random models of every entry of transformers' causal-LM map, made from its own configs by shrinking them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ENTRIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_X: dict[int, tuple[str, ...]] = {
    64: ("vocab_size", "vocab_size_per_layer_input"),
    32: (
        "hidden_size d_model n_embd embedding_size intermediate_size d_ff ffn_dim decoder_ffn_dim encoder_ffn_dim "
        "moe_intermediate_size shared_expert_intermediate_size"
    ).split(),
    2: ("num_hidden_layers",),
}
SIZES: dict[str, Any] = {
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "sliding_window": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers", "num_blocks")
for names, value in [
    ("vocab_size decoder_vocab_size vocab_size_per_layer_input", 64),
    ("hidden_size d_model n_embd embedding_size intermediate_size d_ff dff ffn_dim dim_ff decoder_ffn_dim encoder_ffn_dim moe_intermediate_size "
     "shared_expert_intermediate_size shared_intermediate_size shared_experts_intermediate_size ffn_hidden_size word_embed_proj_dim emb_dim d_inner lru_width expert_ffn_hidden_size "
     "attention_hidden_size intermediate_size_mlp dense_intermediate_size embedding_dim feed_forward_size moe_shared_expert_intermediate_size n_inner "
     "input_embedding_size output_embedding_size mamba_d_ssm moe_latent_size backbone_hidden_size", 32),
    ("head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim global_head_dim swa_head_dim swa_v_head_dim attention_head_dim kv_channels attention_head_size d_head d_kv dim_head index_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_head mamba_headdim mamba_head_dim q_lora_rank "
     "kv_lora_rank o_lora_rank hidden_size_per_layer_input laurel_rank rotary_dim query_pre_attn_scalar hc_lowrank gated_norm_rank router_hidden_size adapter_rank mamba_d_state ssm_state_size state_size time_step_rank mamba_dt_rank d_rel", 8),
    ("num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads num_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads linear_num_value_heads linear_num_heads mamba_n_heads mamba_num_heads attention_heads "
     "num_experts n_routed_experts num_local_experts moe_num_experts index_n_heads", 4),
    ("num_key_value_heads num_kv_heads num_global_key_value_heads swa_num_key_value_heads linear_num_key_heads num_query_groups moe_topk num_experts_per_tok", 2),
    ("n_group topk_group", 1),
    ("max_position_embeddings n_positions n_ctx model_max_length max_seq_len max_target_positions context_length", 128),
    ("sliding_window sliding_window_size attention_window_size local_attention index_topk", 16),
    ("qk_head_dim", 16),
    ("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2),
]:
    SIZES |= dict.fromkeys(names.split(), value)
SIZES |= dict.fromkeys(LAYERS, 2) | {"initializer_range": 0.3, "init_std": 0.3}


MAMBA = {"mamba_expand": 1, "mamba_n_groups": 1}
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA, "mamba_n_heads": 4, "mamba_d_head": 8},
    "granitemoehybrid": {**MAMBA, "mamba_n_heads": 4, "mamba_d_head": 8},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_k": 2},
    "kimi_linear": {"num_experts_per_token": 2},
    "mamba2": {"expand": 1, "n_groups": 1},
    "nemotron_h": {"n_groups": 1, "mamba_n_groups": 1},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "emu3": {"pad_token_id": 0},
    "bailing_hybrid": {"n_group": 1, "num_group": 1, "topk_group": 1, "num_experts_per_token": 2, "num_experts_per_tok": 2},
    "roc_bert": {"pronunciation_vocab_size": 64, "shape_vocab_size": 64, "pronunciation_embed_dim": 32, "shape_embed_dim": 32},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16]},
    "dots3_note": {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "swa_head_dim": 16},
    "dots3_note_text": {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "swa_head_dim": 16},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
}


def shrunk(defaults: dict[str, Any], special: dict[str, Any]) -> dict[str, Any]:
    """Settings that make a config with these defaults tiny."""
    settings = {name: SIZES[name] for name in defaults if name in SIZES}
    if not any("full" in str(kind) for kind in defaults.get("layer_types") or ()):
        settings |= {name: 96 for name in settings if name.startswith("sliding_window")}
    if "kv_lora_rank" in defaults and "num_key_value_heads" in settings:
        settings["num_key_value_heads"] = SIZES["num_attention_heads"]
    layers = next((defaults[name] for name in LAYERS if isinstance(defaults.get(name), int)), None)
    lists = {name: value for name, value in defaults.items() if isinstance(value, list) and len(value) == layers}
    if lists:
        seen: dict[Any, int] = {}
        for number, kinds in enumerate(zip(*map(lambda v: map(str, v), lists.values()), strict=True)):
            seen.setdefault(kinds, number)
        chosen = sorted(seen.values())[:4]
        if len(chosen) == 1:
            chosen *= 2
        settings |= {name: [value[number] for number in chosen] for name, value in lists.items()}
        settings |= {name: len(chosen) for name in LAYERS if name in defaults}
    for name, value in defaults.items():
        if name.endswith("_config") and isinstance(value, dict) and value:
            settings[name] = shrunk(value, special.get(name, {})) | ({"model_type": value["model_type"]} if "model_type" in value else {})
    return settings | special


def config_of(entry: str) -> PreTrainedConfig:
    kind = CONFIG_MAPPING[entry]
    special = SPECIAL.get(entry, {})
    try:
        defaults = kind().to_dict()
    except Exception:
        defaults = special
    return kind(**shrunk(defaults, special))


def make(entry: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = config_of(entry)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kind = kind[0] if isinstance(kind, tuple) else kind
    if not isinstance(config, kind.config_class):
        config = config.get_text_config(decoder=True)
    with torch.device("meta"):
        count = sum(p.numel() for p in kind(config).parameters())
    if count > 3_000_000:
        raise ValueError(f"{count} parameters")
    return kind(config).eval()


if __name__ == "__main__":
    import sys, time, traceback
    torch.set_grad_enabled(False)
    n = 0
    for e in sys.argv[1:] or ENTRIES:
        t = time.time()
        try:
            m = make(e)
            i = torch.randint(3, 64, (1, 12))
            l = m(i, use_cache=False).logits
            assert l.shape == (1, 12, 64), l.shape
            assert l.isfinite().all()
            n += 1
            if time.time() - t > .5: print("slow", e, time.time() - t)
        except Exception as x:
            if len(sys.argv) > 1: traceback.print_exc()
            where = traceback.extract_tb(x.__traceback__)[-1]
            print("##", e, type(x).__name__, str(x)[:200].replace("\n", " "), where.filename.split("/")[-1], where.lineno, where.line, flush=True)
    print(n)
