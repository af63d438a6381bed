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

ARCHITECTURES = {"deepseek2": _DEEPSEEK, "dots1": _DOTS}
MODEL_TYPES = {
    "deepseek_v2": ModelType(_DEEPSEEK, {"topk_method": "greedy"}, {"norm_topk_prob": False}),
    "deepseek_v3": ModelType(_DEEPSEEK_3),
    "axk1": ModelType(
        _DEEPSEEK_3.with_names(
            {"post_ffw_norm": "post_mlp_layernorm"},
            norms=BEFORE | {"after_mlp": "post_ffw_norm"},
            optional_norms={"after_mlp"},
        )
    ),
    "glm4_moe_lite": ModelType(_DEEPSEEK_3),
    "youtu": ModelType(_DEEPSEEK),
    "minicpm3": ModelType(
        _DEEPSEEK,
        fixed={"rope_interleave": False},
        numbers=lambda config: {
            "residual_scale": config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
            "logit_scale": config["dim_model_base"] / config["hidden_size"],
        },
    ),
    "dots1": ModelType(_DOTS),
    "solar_open": ModelType(_DOTS),
}
