"""Families of a few lines."""

from dataclasses import replace

from h2o_stream.native.abi import Activation, NormKind, Scoring
from h2o_stream.runtime.families.architecture import (
    AFTER,
    AFTER_ONLY,
    AS_MLP,
    BEFORE,
    EMBEDDING,
    FINAL_NORM,
    LATE_NORM,
    OUTPUT,
    SHARED_EXPERTS,
    Architecture,
    ModelType,
)

_PHI_3 = Architecture(fused_mlp=True).with_names({"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"})
_STARCODER_2 = Architecture(activation=Activation.GELU_TANH).with_names(
    {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
)

ARCHITECTURES = {
    "exaone4": replace(AFTER_ONLY, full_every=4, rotates_sliding=True),
    "phi3": _PHI_3,
    "seed_oss": LATE_NORM,
    "stablelm": Architecture(),
    "starcoder2": _STARCODER_2,
}
_EXAONE_4 = ARCHITECTURES["exaone4"]
_GPT_NEOX = Architecture(
    activation=Activation.GELU_ERF,
    parallel=True,
    qkv_by_head=True,
    layers="gpt_neox.layers",
).with_names(
    {
        EMBEDDING: "gpt_neox.embed_in",
        OUTPUT: "embed_out",
        FINAL_NORM: "gpt_neox.final_layer_norm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    }
)
_PHI = Architecture(
    parallel=True,
    norms={"before_attention": "attn_norm", "before_mlp": "attn_norm"},
    activation=Activation.GELU_TANH,
).with_names(
    {
        FINAL_NORM: "model.final_layernorm",
        "attn_output": "self_attn.dense",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    }
)
_SLIDING_BESIDE_PLAIN = Architecture(rotates_sliding=True, scoring=Scoring.SIGMOID).with_names(SHARED_EXPERTS)
"""Layers with a sliding window have RoPE, the others no positions; experts are chosen by sigmoids."""

MODEL_TYPES = {
    "phi3": ModelType(_PHI_3, slides_everywhere=True),
    "phi4_multimodal": ModelType(_PHI_3, slides_everywhere=True),
    "starcoder2": ModelType(_STARCODER_2, {"tie_word_embeddings": True}, norm=NormKind.LAYER, slides_everywhere=True),
    "exaone4": ModelType(_EXAONE_4, {"sliding_window": 4096}),
    "exaone_moe": ModelType(
        replace(_SLIDING_BESIDE_PLAIN, full_every=4).with_names({"exp_probs_b": "mlp.e_score_correction_bias"}),
        {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "sliding_window": 4096},
        module_names=SHARED_EXPERTS,
    ),
    "seed_oss": ModelType(LATE_NORM, {"head_dim": 128}),
    "gpt_neox": ModelType(_GPT_NEOX, {"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5}, norm=NormKind.LAYER),
    "phi": ModelType(_PHI, {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5}, norm=NormKind.LAYER),
    "persimmon": ModelType(
        replace(_PHI, parallel=False, norms=BEFORE, qkv_by_head=True, activation=Activation.RELU_SQUARED).with_names(
            {
                "attn_qkv": "self_attn.query_key_value",
                "ffn_up": "mlp.dense_h_to_4h",
                "ffn_down": "mlp.dense_4h_to_h",
            }
        ),
        {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
        norm=NormKind.LAYER,
    ),
    "jais2": ModelType(
        Architecture(activation=Activation.RELU_SQUARED), {"head_dim": 128, "layer_norm_eps": 1e-5}, norm=NormKind.LAYER
    ),
    "apertus": ModelType(
        Architecture(activation=Activation.XIELU).with_names(
            {f"ffn_act.{name}": f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")}
            | {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
        ),
        {"rope_theta": None},
    ),
    "bitnet": ModelType(
        Architecture(activation=Activation.RELU_SQUARED).with_names(
            {"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"}
        ),
        {"rope_theta": 500_000.0},
    ),
    "nanochat": ModelType(
        Architecture(
            activation=Activation.RELU_SQUARED,
            bare_norms=True,
            norms_embedding=True,
            swaps_halves=True,
        ).with_names({"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}),
        {"final_logit_softcapping": 15.0},
    ),
    "aria_text": ModelType(
        Architecture(normalizes_experts=True, transposed_experts=True).with_names(
            SHARED_EXPERTS
            | {
                "ffn_gate_up_exps": "mlp.experts.fc1",
                "ffn_down_exps": "mlp.experts.fc2",
                "ffn_gate_inp": "mlp.router",
            }
        ),
        {"head_dim": 128, "moe_topk": 2, "moe_num_shared_experts": 2},
        AS_MLP,
    ),
    "afmoe": ModelType(
        replace(_SLIDING_BESIDE_PLAIN, full_every=4, norms=BEFORE | AFTER).with_names(
            {
                "attn_output_gate": "self_attn.gate_proj",
                "post_attention_norm": "post_attention_layernorm",
                "ffn_norm": "pre_mlp_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
                "ffn_gate_inp": "mlp.router.gate",
                "exp_probs_b": "mlp.expert_bias",
            }
        ),
        {"head_dim": 128, "num_shared_experts": 0, "num_experts_per_tok": 6, "sliding_window": 1024},
        {"norm_topk_prob": True},
    ),
    "flint": ModelType(
        replace(_SLIDING_BESIDE_PLAIN, scoring=Scoring.SOFTMAX).with_names({"attn_sinks": "self_attn.softmax_offset"}),
        {"head_dim": 128, "sliding_window": 513, "norm_topk_prob": True},
        module_names={"attn_sinks": "self_attn.sinks"},
    ),
    "kolibri1": ModelType(
        replace(_SLIDING_BESIDE_PLAIN, full_every=5, norms=BEFORE | AFTER).with_names(
            {
                "post_attention_norm": "post_attn_norm",
                "post_ffw_norm": "post_ffn_norm",
                "exp_probs_b": "moe.router.expert_bias",
            }
        ),
        {"head_dim": 128, "norm_topk_prob": False, "sliding_window": 513},
        module_names=SHARED_EXPERTS
        | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
    ),
}
