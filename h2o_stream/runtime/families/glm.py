"""GLM-4, with experts, and its predecessors."""

from h2o_stream.native.abi import Scoring
from h2o_stream.runtime.families.architecture import AFTER, BEFORE, LATE_NORM, SHARED_EXPERTS, Architecture, ModelType

_GLM = Architecture(model_type="glm", adjacent=True, fused_mlp=True).with_names({"ffn_up": "mlp.gate_up_proj"})

_GLM_4 = _GLM.with_names(
    {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
    model_type="glm4",
    norms=BEFORE | AFTER,
)
_GLM_4_MOE = LATE_NORM.with_names(SHARED_EXPERTS, model_type="glm4_moe", scoring=Scoring.SIGMOID)

ARCHITECTURES = {"chatglm": _GLM, "glm4": _GLM_4, "glm4moe": _GLM_4_MOE}
MODEL_TYPES = {
    "glm": ModelType(_GLM),
    "glm4": ModelType(_GLM_4),
    "glm4_moe": ModelType(_GLM_4_MOE),
}
