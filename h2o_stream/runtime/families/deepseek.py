"""DeepSeek V2, V3 and R1: latent keys and values; dots.llm1, which has their experts."""

from h2o_stream.native.abi import Scoring
from h2o_stream.runtime.families.architecture import SHARED_EXPERTS, Architecture
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


ARCHITECTURES = {
    "deepseek2": Architecture(model_type=_model_type).with_names(SHARED_EXPERTS | _LATENT),
    "dots1": Architecture(scoring=Scoring.SIGMOID).with_names(SHARED_EXPERTS),
}
