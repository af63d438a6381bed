"""ERNIE 4.5, and Helium, whose RoPE rotates adjacent pairs, too."""

from h2o_stream.runtime.families.architecture import SHARED_EXPERTS, Architecture, ModelType

_ERNIE = Architecture(adjacent=True)

_MOE = _ERNIE.with_names(
    SHARED_EXPERTS | {"exp_probs_b": "mlp.gate.moe_statics.e_score_correction_bias"},
    model_type="ernie4_5_moe",
    normalizes_experts=True,
)
_DEFAULTS = {"tie_word_embeddings": True, "rope_theta": 500_000.0}

ARCHITECTURES = {"ernie4_5": _ERNIE, "ernie4_5-moe": _MOE}
MODEL_TYPES = {
    "ernie4_5": ModelType(_ERNIE, {**_DEFAULTS, "head_dim": 128}),
    "ernie4_5_moe": ModelType(_MOE.with_names({"exp_probs_b": "mlp.moe_statics.e_score_correction_bias"}), _DEFAULTS),
    "helium": ModelType(_ERNIE, {"head_dim": 128, "rope_theta": 100_000.0}),
}
