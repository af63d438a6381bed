"""Tiny random models of more families, with settings that their defaults hide."""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from tests.causal_models import make
from tests.families import EXPERTS, GROUPED, LATENT, PARTIAL, PER_HEAD, SIZES, SLIDING, rope, tiny

IN_GROUPS = {"num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2,
    "n_routed_experts": 8, "num_local_experts": 8, "num_experts": 8}  # fmt: skip
"""Settings of eight experts in four groups, under the names that families give them."""

GEMMA_4 = {**GROUPED, "num_hidden_layers": 4, "sliding_window": 10, "layer_types": SLIDING * 2}
LLAMA_4 = {**GROUPED, **EXPERTS, "intermediate_size_mlp": 48, "attention_chunk_size": 10, "no_rope_layers": [1, 0],
    "layer_types": ["chunked_attention", "full_attention"]}  # fmt: skip
DEEPSEEK_YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=0.7)


def settled(entry: str) -> Callable[[], PreTrainedModel]:
    """An entry of transformers' map."""
    return lambda: make(entry)


OTHERS: dict[str, Callable[[], Any]] = {
    "Flint": tiny("Flint", **GROUPED, sliding_window=16, layer_types=SLIDING),
    "GLM, YaRN": tiny("Glm", **GROUPED, **rope("yarn", factor=4.0, original_max_position_embeddings=32,
        partial_rotary_factor=0.5)),
    "HyperCLOVA X": tiny("HyperCLOVAX", **GROUPED, use_post_norm=True),
    "HyperCLOVA X, two norms": tiny("HyperCLOVAX", **GROUPED, use_post_norm=False),
    "Jais 2": tiny("Jais2", **GROUPED),
    "LFM2, all attention": tiny("Lfm2", **GROUPED, layer_types=["full_attention"] * 2),
    "Llama, dynamic": tiny("Llama", **GROUPED, **rope("dynamic", factor=2.0)),
    "Llama, gelu": tiny("Llama", **GROUPED, hidden_act="gelu_new"),
    "GPT-NeoX, one after the other": tiny("GPTNeoX", **SIZES, **PARTIAL, use_parallel_residual=False),
    "OLMo": tiny("Olmo", **GROUPED),
    "OPT, without biases": tiny("OPT", **{**SIZES, "word_embed_proj_dim": 32, "ffn_dim": 32, "enable_bias": False,
        "init_std": 0.4}),
    "Persimmon": tiny("Persimmon", **SIZES, **PARTIAL),
    "Phi, output bias": tiny("Phi", **SIZES, **PARTIAL),
    "Phi, normed queries": tiny("Phi", **SIZES, **PARTIAL, qk_layernorm=True),
    "SmolLM3, rotary only": tiny("SmolLM3", **GROUPED, no_rope_layers=[1, 1]),
    "StableLM, biases": tiny("StableLm", **PER_HEAD, **PARTIAL, use_qkv_bias=True),
    "StableLM, parallel": tiny("StableLm", **PER_HEAD, **PARTIAL, use_parallel_residual=True),
    "VaultGemma": tiny("VaultGemma", **GROUPED),
}  # fmt: skip
"""Families and settings that files do not have."""

MORE: dict[str, Callable[[], Any]] = {
    "AFMoE": tiny("Afmoe", **{**GROUPED, **EXPERTS}, num_dense_layers=1, sliding_window=10, layer_types=SLIDING,
        num_shared_experts=2, route_scale=2.5, mup_enabled=True),
    "Apertus": tiny("Apertus", **GROUPED),
    "Aria": tiny("AriaText", **GROUPED, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
    "A.X-K1": tiny("AXK1", **{**LATENT, **IN_GROUPS}, mlp_layer_types=["dense", "sparse"], n_shared_experts=1,
        routed_scaling_factor=1.5),
    "BitNet": tiny("BitNet", **GROUPED),
    "DeepSeek V2": tiny("DeepseekV2", **{**LATENT, **IN_GROUPS, "q_lora_rank": None, "first_k_dense_replace": 1},
        topk_method="group_limited_greedy", routed_scaling_factor=2.0),
    "DeepSeek V3, experts": tiny("DeepseekV3", **{**LATENT, **IN_GROUPS, "first_k_dense_replace": 1,
        "v_head_dim": 4, "qk_rope_head_dim": 4}, **DEEPSEEK_YARN),
    "DeepSeek V3, halves": tiny("DeepseekV3", **LATENT, rope_interleave=False, attention_bias=True),
    "GLM 4.7 Flash": tiny("Glm4MoeLite", **{**LATENT, **IN_GROUPS}, mlp_layer_types=["dense", "sparse"]),
    "GLM 4 MoE, groups": tiny("Glm4Moe", **{**GROUPED, **IN_GROUPS}, first_k_dense_replace=1),
    "Granite MoE, shared": tiny("GraniteMoeShared", **GROUPED, **EXPERTS, shared_intermediate_size=48),
    "Granite MoE SWA": tiny("GraniteMoeSWA", **GROUPED, **EXPERTS, shared_intermediate_size=48, sliding_window=10,
        layer_types=SLIDING, layer_rope_theta=[10000.0, 0.0]),
    "Gemma 4, one embedding": tiny("Gemma4", "Gemma4Text", **GEMMA_4, num_kv_shared_layers=0, global_head_dim=16,
        hidden_size_per_layer_input=0),
    "Gemma 4, keys as values": tiny("Gemma4", "Gemma4Text", **GEMMA_4, num_kv_shared_layers=0, global_head_dim=16,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=64, attention_k_eq_v=True,
        num_global_key_value_heads=1),
    "Gemma 4, wide": tiny("Gemma4", "Gemma4Text", **{**GEMMA_4, "num_hidden_layers": 6, "layer_types": SLIDING * 3},
        num_kv_shared_layers=3, global_head_dim=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=64,
        use_double_wide_mlp=True),
    "Gemma 4, experts": tiny("Gemma4", "Gemma4Text", **GEMMA_4, num_kv_shared_layers=0, global_head_dim=8,
        hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=16),
    "Gemma 3n, three versions": tiny("Gemma3n", "Gemma3nText", **{**GEMMA_4, "num_hidden_layers": 5,
        "layer_types": [*SLIDING * 2, "full_attention"]}, num_kv_shared_layers=1, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=48, laurel_rank=8, altup_num_inputs=3, altup_active_idx=1, altup_correct_scale=False,
        activation_sparsity_pattern=[0.9, 0.0, 0.5, 0.3, 0.0]),
    "HunYuan MoE": tiny("HunYuanMoEV1", **GROUPED, num_experts=4, moe_topk=2),
    "HY 3": tiny("HYV3", **GROUPED, **EXPERTS, num_shared_experts=1, router_scaling_factor=2.0,
        mlp_layer_types=["dense", "sparse"]),
    "Laguna": tiny("Laguna", **GROUPED, **EXPERTS, shared_expert_intermediate_size=16, sliding_window=10,
        layer_types=SLIDING, mlp_layer_types=["dense", "sparse"], num_attention_heads_per_layer=[4, 2],
        moe_routed_scaling_factor=1.5),
    "Laguna, one gate a head": tiny("Laguna", **GROUPED, **EXPERTS, shared_expert_intermediate_size=16, gating=True,
        layer_types=["full_attention"] * 2, mlp_layer_types=["dense"] * 2, num_attention_heads_per_layer=[4, 4]),
    "Llama 4, temperatures": tiny("Llama4", "Llama4Text", **LLAMA_4, floor_scale=4, attn_scale=0.7),
    "Llama 4, dense": tiny("Llama4", "Llama4Text", **LLAMA_4, moe_layers=[1], use_qk_norm=False),
    "MiMo V2, scaled values": tiny("MiMoV2Flash", **GROUPED, **EXPERTS, v_head_dim=4, n_routed_experts=4,
        sliding_window=10, layer_types=SLIDING, attention_value_scale=0.6),
    "MiniCPM 3": tiny("MiniCPM3", **LATENT, scale_emb=3.0, scale_depth=1.4, dim_model_base=16, **rope("default")),
    "MiniMax M2": tiny("MiniMaxM2", **GROUPED, **EXPERTS),
    "Ministral 3": tiny("Ministral3", **GROUPED, **rope("yarn", factor=4.0, original_max_position_embeddings=8,
        llama_4_scaling_beta=0.3)),
    "Moshi": tiny("Moshi", **PER_HEAD, ffn_dim=48, head_dim=8),
    "OLMo, clipped": tiny("Olmo", **GROUPED, clip_qkv=0.5),
    "Phi MoE": tiny("Phimoe", **GROUPED, **EXPERTS, router_jitter_noise=0.4, **rope("default")),
    "Youtu": tiny("Youtu", **LATENT),
    **{entry: settled(entry) for entry in ("fuyu", "gemma3", "gemma4", "gemma4_unified", "got_ocr2",
        "lfm3", "minimax_m3_vl_text", "moss_transcribe_diarize", "phi4_multimodal")},
}  # fmt: skip
