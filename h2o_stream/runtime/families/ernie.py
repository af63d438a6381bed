"""ERNIE 4.5."""

from h2o_stream.runtime.families.architecture import SHARED_EXPERTS, Architecture

_ERNIE = Architecture(adjacent=True)

ARCHITECTURES = {
    "ernie4_5": _ERNIE,
    "ernie4_5-moe": _ERNIE.with_names(
        SHARED_EXPERTS | {"exp_probs_b": "mlp.gate.moe_statics.e_score_correction_bias"},
        model_type="ernie4_5_moe",
        normalizes_experts=True,
    ),
}
