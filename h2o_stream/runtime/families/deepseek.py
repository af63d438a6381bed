"""DeepSeek V2, V3, R1 and others with latent keys and values; dots.llm1 and Solar, which have their experts."""

from dataclasses import replace

from h2o_stream.native.abi import Scoring
from h2o_stream.runtime.families.architecture import BEFORE, SHARED_EXPERTS, Architecture, ModelType
from h2o_stream.runtime.parameters import Parameters

_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    **dict.fromkeys(("attn_kv_b", "attn_k_b", "attn_v_b"), "self_attn.kv_b_proj"),
}
"""Files may have the last one in two parts."""


def _model_type(parameters: Parameters) -> str:
    experts = parameters.experts
    return "deepseek_v3" if experts and experts.scoring == Scoring.SIGMOID else "deepseek_v2"


_DEEPSEEK = Architecture(model_type=_model_type, adjacent=True).with_names(SHARED_EXPERTS | _LATENT)
_DEEPSEEK_3 = replace(_DEEPSEEK, scoring=Scoring.SIGMOID)
_DOTS = Architecture(scoring=Scoring.SIGMOID).with_names(SHARED_EXPERTS)
_DEFAULTS = {
    "norm_topk_prob": True,
    "rope_interleave": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
}

ARCHITECTURES = {"deepseek2": _DEEPSEEK, "dots1": _DOTS}
MODEL_TYPES = {
    "deepseek_v2": ModelType(_DEEPSEEK, {"topk_method": "greedy"}, {"norm_topk_prob": False}),
    "deepseek_v3": ModelType(_DEEPSEEK_3, _DEFAULTS),
    "axk1": ModelType(
        _DEEPSEEK_3.with_names(
            {"post_ffw_norm": "post_mlp_layernorm"},
            norms=BEFORE | {"after_mlp": "post_ffw_norm"},
            optional_norms={"after_mlp"},
        ),
        _DEFAULTS,
    ),
    "glm4_moe_lite": ModelType(_DEEPSEEK_3, {**_DEFAULTS, "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1}),
    "youtu": ModelType(_DEEPSEEK, {"tie_word_embeddings": True, "rope_interleave": True}),
    "minicpm3": ModelType(
        _DEEPSEEK,
        {"tie_word_embeddings": True, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
        {"rope_interleave": False},
        numbers=lambda config: {
            "residual_scale": config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
            "logit_scale": config["dim_model_base"] / config["hidden_size"],
        },
    ),
    "dots1": ModelType(_DOTS, {"norm_topk_prob": False}),
    "solar_open": ModelType(_DOTS, {"norm_topk_prob": True, "head_dim": 128, "rope_theta": 1e6}),
}
