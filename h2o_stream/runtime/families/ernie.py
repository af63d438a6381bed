"""ERNIE 4.5, and Helium, whose RoPE rotates adjacent pairs, too."""

from h2o_stream.runtime.families.architecture import SHARED_EXPERTS, Architecture, ModelType

_ERNIE = Architecture(adjacent=True)

_MOE = _ERNIE.with_names(
    SHARED_EXPERTS | {"exp_probs_b": "mlp.gate.moe_statics.e_score_correction_bias"},
    model_type="ernie4_5_moe",
    normalizes_experts=True,
)

ARCHITECTURES = {"ernie4_5": _ERNIE, "ernie4_5-moe": _MOE}
MODEL_TYPES = {
    "ernie4_5": ModelType(_ERNIE),
    "ernie4_5_moe": ModelType(_MOE.with_names({"exp_probs_b": "mlp.moe_statics.e_score_correction_bias"})),
    "helium": ModelType(_ERNIE),
}
