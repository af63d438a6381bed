"""GLM-4, with experts, and its predecessors."""

from h2o_stream.native.abi import Scoring
from h2o_stream.runtime.families.architecture import AFTER, BEFORE, LATE_NORM, SHARED_EXPERTS, Architecture

_GLM = Architecture(model_type="glm", adjacent=True, fused_mlp=True).with_names({"ffn_up": "mlp.gate_up_proj"})

ARCHITECTURES = {
    "chatglm": _GLM,
    "glm4": _GLM.with_names(
        {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
        model_type="glm4",
        norms=BEFORE | AFTER,
    ),
    "glm4moe": LATE_NORM.with_names(SHARED_EXPERTS, model_type="glm4_moe", scoring=Scoring.SIGMOID),
}
