"""A tiny random model of every family that is described from files."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from transformers import PreTrainedModel

from h2o_stream.config import Positions
from tests.families import GROUPED, tiny
from tests.gguf_files import write_model

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SMALLER = {**GROUPED, "intermediate_size": 96, "max_position_embeddings": 512}


def rope(kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 5000.0, **more}


def yarn(context: int, **more: Any) -> dict[str, Any]:
    return rope("yarn", **{"factor": 4.0, "original_max_position_embeddings": context, **more})


THETA = {"rope_parameters": rope()}
PARTIAL = {"rope_parameters": rope(partial_rotary_factor=0.5)}
TWO_KINDS, LINEAR, CONV = ([kind, "full_attention"] for kind in ("sliding_attention", "linear_attention", "conv"))
SLIDING = {"sliding_window": 24, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
EXPERT_NAMES = ("num_local_experts", "num_experts", "n_routed_experts")
EXPERTS = {**dict.fromkeys(EXPERT_NAMES, 4), "num_experts_per_tok": 2}
SMALL = {**EXPERTS, "moe_intermediate_size": 32}
SHARED = {**SMALL, "first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.7}
SCALES = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 4.0,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip
GEMMA_4: dict[str, Any] = {
    "sliding_window": 24, "global_head_dim": 32, "vocab_size_per_layer_input": 64, "tie_word_embeddings": False,
    "final_logit_softcapping": 30.0, "rope_parameters": {"sliding_attention": rope(rope_theta=10000.0),
    "full_attention": rope("proportional", partial_rotary_factor=0.25)},
}  # fmt: skip
STATE_SPACE = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_expand": 2, "mamba_d_conv": 4}
GRANITE_4 = {**SCALES, **STATE_SPACE, "layer_types": LINEAR * 2, "shared_intermediate_size": 96, "num_local_experts": 0}
QWEN_HYBRID = {
    "layer_types": LINEAR * 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "rope_parameters": rope(partial_rotary_factor=0.25),
}  # fmt: skip
QWEN_EXPERTS = {**QWEN_HYBRID, **SMALL, "linear_num_value_heads": 4, "shared_expert_intermediate_size": 64}
NEMOTRON_H = {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 32}


@dataclass(frozen=True)
class FamilyModel:
    """A tiny model, and how it is tested.

    Attributes:
        architecture: llama.cpp's name; empty if there is no GGUF file.
        make: makes the model; cached.
        checkpoint: whether its checkpoint is described without torch, too.
        permuted: whether GGUF files have rows of queries and keys in the order of RoPE by adjacent pairs.
        in_llama: whether llama.cpp computes the same with so small a model.
        llama_rounding: rounding of llama.cpp's logits, relative to the largest; it has a table of GELU.
        positions: where RoPE sees the kept tokens.
    """

    architecture: str
    make: Callable[[], PreTrainedModel]
    checkpoint: bool = False
    permuted: bool = False
    in_llama: bool = True
    llama_rounding: float = 1e-4
    positions: Positions | None = None


def row(
    architecture: str,
    kind: str,
    config_kind: str = "",
    checkpoint: bool = False,
    permuted: bool = False,
    in_llama: bool = True,
    llama_rounding: float = 1e-4,
    positions: Positions | None = None,
    **settings: Any,
) -> FamilyModel:
    """A row with a model of four layers, whose norms and biases are not trivial."""
    sizes = {**SIZES, **settings}
    if kind == "NemotronH":  # it follows from the kinds of its layers
        del sizes["num_hidden_layers"]
    make = tiny(kind, config_kind, **sizes)

    def changed() -> PreTrainedModel:
        made, generator = make(), torch.Generator().manual_seed(3)
        for name, weights in made.state_dict().items():
            if weights.ndim == 1 or not weights.any():
                weights += 0.1 * torch.randn(weights.shape, generator=generator)
            if kind == "Gemma3n" and (".post_" in name or "post_laurel" in name):
                weights *= 0.1  # its many layers each add little, as they would amplify rounding
        if kind == "NemotronH":  # without a limit of steps in prompts, which no file has
            made.model.layers[0].mixer.time_step_limit, made.config.time_step_min = (0.0, math.inf), 0.0
        return made

    return FamilyModel(
        architecture, functools.cache(changed), checkpoint, permuted, in_llama, llama_rounding, positions
    )


def smaller(
    architecture: str, kind: str, config_kind: str = "", llama_rounding: float = 1e-4, **settings: Any
) -> FamilyModel:
    """A row with a model of two layers, whose checkpoint is described, too."""
    make = tiny(kind, config_kind, **{**SMALLER, **settings})
    return FamilyModel(architecture, make, checkpoint=True, llama_rounding=llama_rounding)


MODELS = {
    "Llama": smaller("llama", "Llama", **THETA),
    "Llama 3": smaller("llama", "Llama", rope_parameters=rope("llama3", rope_theta=500000.0, factor=8.0,
        low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)),
    "Llama, tied": smaller("llama", "Llama", tie_word_embeddings=True),
    "Llama, biases": smaller("llama", "Llama", attention_bias=True, mlp_bias=True),
    "Llama, linear": smaller("llama", "Llama", rope_parameters=rope("linear", factor=2.0)),
    "Llama, YaRN": row("llama", "Llama", rope_parameters=yarn(128)),
    "Mistral": smaller("", "Mistral", sliding_window=200),
    "Mistral Small 3": row("mistral3", "Mistral", permuted=True, **THETA, sliding_window=None),
    "Ministral 3": row("mistral3", "Ministral3", permuted=True, positions="absolute", rope_parameters=yarn(32,
        beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)),
    "Mixtral": row("llama", "Mixtral", **THETA, **EXPERTS, checkpoint=True),
    "SmolLM3": row("smollm3", "SmolLM3", permuted=True, **THETA, no_rope_layers=[1, 1, 1, 0]),
    "Arcee": row("arcee", "Arcee", permuted=True, **THETA),
    "Qwen 2": smaller("qwen2", "Qwen2", **THETA),
    "Qwen 3": smaller("qwen3", "Qwen3", **THETA),
    "Qwen 2 MoE": smaller("qwen2moe", "Qwen2Moe", **THETA, **SMALL, intermediate_size=64,
        shared_expert_intermediate_size=64),
    "Qwen 3 MoE": smaller("qwen3moe", "Qwen3Moe", **THETA, **SMALL, intermediate_size=64, norm_topk_prob=True),
    "Qwen 3.5": row("qwen35", "Qwen3_5", "Qwen3_5Text", **QWEN_HYBRID, linear_num_value_heads=2),
    "Qwen 3.5 with more value heads": row("qwen35", "Qwen3_5", "Qwen3_5Text", **QWEN_HYBRID, linear_num_value_heads=6),
    "Qwen 3.5 with experts": row("qwen35moe", "Qwen3_5Moe", "Qwen3_5MoeText", **QWEN_EXPERTS),
    "Qwen3-Next": row("qwen3next", "Qwen3Next", **QWEN_EXPERTS),
    "Gemma": row("gemma", "Gemma", **THETA, llama_rounding=2e-3),
    "Gemma 2": smaller("gemma2", "Gemma2", llama_rounding=2e-3, sliding_window=24, query_pre_attn_scalar=8,
        layer_types=TWO_KINDS, attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    "Gemma 3": smaller("gemma3", "Gemma3", "Gemma3Text", llama_rounding=2e-3, num_hidden_layers=6, sliding_window=24,
        query_pre_attn_scalar=8, rope_parameters={"sliding_attention": rope(rope_theta=10000.0),
        "full_attention": rope("linear", factor=8.0)}),
    "Gemma 3n": row("gemma3n", "Gemma3n", "Gemma3nText", llama_rounding=5e-3, num_hidden_layers=25,
        layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 5, sliding_window=24, hidden_size=96,
        intermediate_size=256, num_kv_shared_layers=5, hidden_size_per_layer_input=256, vocab_size_per_layer_input=64,
        laurel_rank=64, final_logit_softcapping=30.0),
    "Gemma 4": row("gemma4", "Gemma4", "Gemma4Text", **GEMMA_4, llama_rounding=2e-3, num_hidden_layers=6,
        layer_types=TWO_KINDS * 3, num_kv_shared_layers=2, hidden_size_per_layer_input=32, use_double_wide_mlp=True),
    "Gemma 4, keys as values": row("gemma4", "Gemma4", "Gemma4Text", **GEMMA_4, llama_rounding=2e-3,
        num_hidden_layers=2, layer_types=TWO_KINDS, num_kv_shared_layers=0, hidden_size_per_layer_input=0,
        attention_k_eq_v=True, num_global_key_value_heads=1),
    "Gemma 4, experts": row("gemma4", "Gemma4", "Gemma4Text", **GEMMA_4, llama_rounding=2e-3,
        layer_types=TWO_KINDS * 2, num_kv_shared_layers=0, hidden_size_per_layer_input=0, enable_moe_block=True,
        num_experts=4, top_k_experts=2, moe_intermediate_size=32),
    "Phi 3": smaller("phi3", "Phi3", **PARTIAL, sliding_window=200),
    "Phi 3, LongRoPE": row("phi3", "Phi3", sliding_window=None, max_position_embeddings=2048,
        original_max_position_embeddings=512, rope_parameters=rope("longrope", partial_rotary_factor=0.5,
        short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[1.0, 2.0, 4.0, 4.0], original_max_position_embeddings=512)),
    "Starcoder 2": smaller("starcoder2", "Starcoder2", **THETA, llama_rounding=2e-3),
    "StableLM": row("stablelm", "StableLm", **PARTIAL),
    "OLMo 2": row("olmo2", "Olmo2", **THETA),
    "OLMo 3": row("olmo2", "Olmo3", **SLIDING, rope_parameters={"sliding_attention": rope(),
        "full_attention": yarn(128)}),
    "OLMoE": row("olmoe", "Olmoe", **THETA, **EXPERTS, num_key_value_heads=4, checkpoint=True),
    "EXAONE 4": row("exaone4", "Exaone4", **THETA, **SLIDING, in_llama=False),
    "EXAONE 4, all full": row("exaone4", "Exaone4", **THETA, sliding_window=None, layer_types=["full_attention"] * 4),
    "Seed-OSS": row("seed_oss", "SeedOss", **THETA),
    "LFM2": row("lfm2", "Lfm2", **THETA, block_auto_adjust_ff_dim=False, layer_types=CONV * 2),
    "LFM2 with experts": row("lfm2moe", "Lfm2Moe", **THETA, **SMALL, num_dense_layers=1, layer_types=CONV * 2),
    "GLM": row("chatglm", "Glm", **PARTIAL, attention_bias=True),
    "GLM-4": row("glm4", "Glm4", **PARTIAL, attention_bias=True),
    "GLM-4 MoE": row("glm4moe", "Glm4Moe", **PARTIAL, **SHARED, use_qk_norm=True, attention_bias=True),
    "dots.llm1": row("dots1", "Dots1", **THETA, **SHARED, num_key_value_heads=4, layer_types=["full_attention"] * 4,
        norm_topk_prob=True),
    "DeepSeek V2 Lite": row("deepseek2", "DeepseekV2", **LATENT, **SHARED, num_hidden_layers=26, q_lora_rank=None,
        n_group=1, topk_group=1, topk_method="greedy", initializer_range=0.1,
        rope_parameters=yarn(128, mscale=0.7, mscale_all_dim=0.7)),
    "DeepSeek V3": row("deepseek2", "DeepseekV3", **THETA, **LATENT, **{**SHARED, **dict.fromkeys(EXPERT_NAMES, 8)},
        q_lora_rank=32, n_group=4, topk_group=2),
    "ERNIE 4.5": row("ernie4_5", "Ernie4_5", **THETA),
    "ERNIE 4.5 MoE": row("ernie4_5-moe", "Ernie4_5_Moe", **THETA, moe_intermediate_size=32, moe_num_experts=4, moe_k=2,
        moe_layer_start_index=1, moe_layer_end_index=3, moe_num_shared_experts=2),
    "HunYuan": row("hunyuan-dense", "HunYuanDenseV1", **THETA, positions="absolute"),
    "HunYuan MoE": row("hunyuan-moe", "HunYuanMoEV1", **THETA, positions="absolute", num_experts=4, moe_topk=2),
    "Cohere": row("command-r", "Cohere", **THETA, logit_scale=0.25),
    "Cohere 2": row("cohere2", "Cohere2", **THETA, **SLIDING, logit_scale=0.25),
    "Granite": row("granite", "Granite", permuted=True, **THETA, **SCALES),
    "Granite MoE": row("granitemoe", "GraniteMoe", permuted=True, **THETA, **EXPERTS, **SCALES),
    "Granite 4": row("granitehybrid", "GraniteMoeHybrid", permuted=True, **GRANITE_4, mamba_n_groups=1),
    "Granite 4, biases": row("granitehybrid", "GraniteMoeHybrid", permuted=True, **GRANITE_4, mamba_n_groups=1,
        mamba_proj_bias=True, in_llama=False),
    "Granite 4 with experts": row("granitehybrid", "GraniteMoeHybrid", permuted=True, **{**GRANITE_4, **EXPERTS},
        mamba_n_groups=2),
    "Nemotron": row("nemotron", "Nemotron", **PARTIAL),
    "Nemotron-H": row("nemotron_h", "NemotronH", **NEMOTRON_H,
        layer_types=["linear_attention", "mlp", "full_attention", "mlp"]),
    "Nemotron-H with experts": row("nemotron_h_moe", "NemotronH", **NEMOTRON_H, n_routed_experts=4,
        layer_types=["linear_attention", "moe", "full_attention", "moe"], num_experts_per_tok=2,
        moe_intermediate_size=32, moe_shared_expert_intermediate_size=64, routed_scaling_factor=1.7),
    "Falcon-H1": row("falcon-h1", "FalconH1", **STATE_SPACE, **THETA, mamba_n_groups=2, mamba_d_ssm=128,
        mamba_rms_norm=True, mamba_norm_before_gate=False),
    "Falcon-H1 without norms": row("falcon-h1", "FalconH1", **STATE_SPACE, **THETA, mamba_d_ssm=128),
    "gpt-oss": row("gpt-oss", "GptOss", **EXPERTS, num_hidden_layers=2, intermediate_size=32, sliding_window=10,
        layer_types=TWO_KINDS, rope_parameters=yarn(16, rope_theta=10000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0,
        truncate=False)),
}  # fmt: skip
GGUF = [name for name, model in MODELS.items() if model.architecture]
"""Names of families with files of GGUF."""

RECURRENT = [name for name in GGUF if name.startswith(("Qwen 3.5", "Qwen3-", "LFM2", "Granite 4", "Nemotron-H", "Fa"))]
"""Names of families with recurrent layers."""

CHECKPOINTS = [name for name, model in MODELS.items() if model.checkpoint]
"""Names of families whose checkpoints are described without torch."""

TEXT = [number * 7 % 61 + 3 for number in range(300)]


def written(place: Path, name: str, stored: str = "Q8_0", model: PreTrainedModel | None = None, **keys: Any) -> Path:
    """The GGUF file of a family at a path or in a folder: with matrices of a type, other weights, other metadata."""
    row, path = MODELS[name], place / "model.gguf" if place.is_dir() else place
    kind = None if stored == "F32" else GGMLQuantizationType[stored]
    write_model(path, model or row.make(), row.architecture, kind, permuted=row.permuted, **keys)
    return path
