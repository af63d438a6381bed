"""Families of a few lines."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from h2o_stream.native.abi import Activation, GateKind, NormKind, Scoring
from h2o_stream.runtime.families.architecture import (
    AFTER,
    AFTER_ONLY,
    AS_MLP,
    BEFORE,
    EMBEDDING,
    FINAL_NORM,
    LATE_NORM,
    OUTPUT,
    POSITIONS,
    SHARED_EXPERTS,
    Architecture,
    ModelType,
)
from h2o_stream.runtime.parameters import LayerShape

_PHI_3 = Architecture(fused_mlp=True).with_names({"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"})
_STARCODER_2 = Architecture(activation=Activation.GELU_TANH, norm=NormKind.LAYER).with_names(
    {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
)

ARCHITECTURES = {
    "exaone4": replace(AFTER_ONLY, full_every=4, rotates_sliding=True),
    "phi3": _PHI_3,
    "seed_oss": LATE_NORM,
    "stablelm": Architecture(norm=NormKind.LAYER),
    "starcoder2": _STARCODER_2,
}
_EXAONE_4 = ARCHITECTURES["exaone4"]
_GPT_NEOX = Architecture(
    activation=Activation.GELU_ERF,
    norm=NormKind.LAYER,
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
    norm=NormKind.LAYER,
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

_OPT = Architecture(
    activation=Activation.RELU, norm=NormKind.LAYER, learned_offset=2, only_modules=True, unrotated_every=1
).with_names(
    {
        EMBEDDING: "model.decoder.embed_tokens",
        POSITIONS: "model.decoder.embed_positions",
        FINAL_NORM: "model.decoder.final_layer_norm",
        "attn_norm": "self_attn_layer_norm",
        "attn_output": "self_attn.out_proj",
        "ffn_norm": "final_layer_norm",
        "ffn_up": "fc1",
        "ffn_down": "fc2",
    },
    layers="model.decoder.layers",
)
_MOSHI = Architecture(fused_mlp=True).with_names(
    {f"attn_{name}": f"self_attn.{name}_proj.linear" for name in ("q", "k", "v")}
    | {"attn_output": "self_attn.o_proj.linear", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
)
_MIMO = Architecture(scoring=Scoring.SIGMOID, normalizes_experts=True).with_names(
    {"attn_sinks": "self_attn.attention_sink_bias", "exp_probs_b": "mlp.gate.e_score_correction_bias"}
)
_LAGUNA = Architecture(scoring=Scoring.SIGMOID, normalizes_experts=True, gate_kind=GateKind.SOFTPLUS_GATE).with_names(
    {"attn_output_gate": "self_attn.g_proj", "exp_probs_b": "mlp.gate.e_score_correction_bias"},
    renamed={"mlp.experts.e_score_correction_bias": "mlp.gate.e_score_correction_bias"},
)


def _opt(config: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ValueError if norms come after the blocks."""
    if not config["do_layer_norm_before"]:
        raise ValueError("norms after the blocks")
    return {"inner_size": int(config["ffn_dim"])}


def _stablelm(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("qk_layernorm"):
        raise ValueError("norms of each head")
    return {}


def _laguna(config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers have query heads of their own number, whose outputs have a gate each or for each number."""
    if config.get("moe_apply_router_weight_on_input"):
        raise ValueError("weights on the inputs of experts")
    sizes = int(config["head_dim"]), int(config["num_key_value_heads"]), int(config["intermediate_size"])
    counts = config.get("num_attention_heads_per_layer")
    counts = counts or [config["num_attention_heads"]] * int(config["num_hidden_layers"])
    shapes = tuple(LayerShape(*sizes, int(heads)) for heads in counts)
    return {"layer_shapes": shapes, "gate_size": int(config["gating"] in (True, "per-head"))}


def _mimo(config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers with a sliding window have twice as many heads."""
    if config.get("sliding_window_size") is not None:
        raise ValueError("a sliding window without the token itself")
    size, heads, inner = (int(config[name]) for name in ("head_dim", "num_key_value_heads", "intermediate_size"))
    factors = ((2 if kind == "sliding_attention" else 1) for kind in config["layer_types"])
    return {"layer_shapes": tuple(LayerShape(size, factor * heads, inner) for factor in factors)}


def _older_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    newer = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    return {name: config[older] for older, name in newer.items() if older in config}


MODEL_TYPES = {
    "opt": ModelType(_OPT, {"layer_norm_eps": 1e-5}, numbers=_opt),
    "stablelm": ModelType(
        ARCHITECTURES["stablelm"],
        numbers=_stablelm,
    ),
    "moshi": ModelType(
        _MOSHI,
        slides_everywhere=True,
        numbers=lambda config: {"inner_size": int(config["ffn_dim"]) // 2, "unsaid_tokens": 1},
    ),
    "mimo_v2_flash": ModelType(
        _MIMO,
        numbers=_mimo,
    ),
    "laguna": ModelType(
        _LAGUNA,
        fixed={"norm_topk_prob": True},
        numbers=_laguna,
    ),
    "phi3": ModelType(_PHI_3, slides_everywhere=True),
    "phi4_multimodal": ModelType(_PHI_3, slides_everywhere=True),
    "starcoder2": ModelType(_STARCODER_2, slides_everywhere=True),
    "exaone4": ModelType(_EXAONE_4),
    "exaone_moe": ModelType(
        replace(_SLIDING_BESIDE_PLAIN, full_every=4).with_names({"exp_probs_b": "mlp.e_score_correction_bias"})
    ),
    "seed_oss": ModelType(LATE_NORM),
    "gpt_neox": ModelType(_GPT_NEOX, older=_older_rope),
    "phi": ModelType(_PHI),
    "persimmon": ModelType(
        replace(_PHI, parallel=False, norms=BEFORE, qkv_by_head=True, activation=Activation.RELU_SQUARED).with_names(
            {
                "attn_qkv": "self_attn.query_key_value",
                "ffn_up": "mlp.dense_h_to_4h",
                "ffn_down": "mlp.dense_4h_to_h",
            }
        ),
    ),
    "jais2": ModelType(Architecture(activation=Activation.RELU_SQUARED, norm=NormKind.LAYER)),
    "apertus": ModelType(
        Architecture(activation=Activation.XIELU).with_names(
            {f"ffn_act.{name}": f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")}
            | {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
        ),
    ),
    "bitnet": ModelType(
        Architecture(activation=Activation.RELU_SQUARED).with_names(
            {"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"}
        ),
    ),
    "nanochat": ModelType(
        Architecture(
            activation=Activation.RELU_SQUARED,
            bare_norms=True,
            norms_embedding=True,
            swaps_halves=True,
        ).with_names({"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}),
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
        fixed=AS_MLP,
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
        fixed={"norm_topk_prob": True},
    ),
    "flint": ModelType(
        replace(_SLIDING_BESIDE_PLAIN, scoring=Scoring.SOFTMAX).with_names({"attn_sinks": "self_attn.softmax_offset"}),
    ),
    "kolibri1": ModelType(
        replace(_SLIDING_BESIDE_PLAIN, full_every=5, norms=BEFORE | AFTER, biases_logits=True).with_names(
            {
                "post_attention_norm": "post_attn_norm",
                "post_ffw_norm": "post_ffn_norm",
                "exp_probs_b": "moe.router.expert_bias",
            }
        ),
    ),
}
