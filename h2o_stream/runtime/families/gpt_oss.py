"""gpt-oss, and MiniMax M3, which has its activation."""

from h2o_stream.native.abi import Activation, Scoring
from h2o_stream.runtime.families.architecture import AS_MLP, LATE_NORM, ModelType

_GPT_OSS = LATE_NORM.with_names(
    {"attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router"},
    model_type="gpt_oss",
    activation=Activation.CLAMPED_SWIGLU,
    activation_parameters=(1.702, 7.0, 1.0),
    full_every=2,
    whole_ramp=False,
    normalizes_experts=True,
    interleaved_experts=True,
)

ARCHITECTURES = {"gpt-oss": _GPT_OSS}
MODEL_TYPES = {
    "gpt_oss": ModelType(
        _GPT_OSS.with_names({"ffn_gate_up_exps": "mlp.experts.gate_up_proj"}),
        fixed=AS_MLP,
    ),
    "minimax_m3_vl_text": ModelType(
        LATE_NORM.with_names(
            {
                "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
                "ffn_down_shexp": "mlp.shared_experts.down_proj",
                "ffn_gate_up_shexp": "mlp.shared_experts.gate_up_proj",
                "exp_probs_b": "mlp.gate.e_score_correction_bias",
            },
            activation=Activation.CLAMPED_SWIGLU,
            norm_offset=1.0,
            scoring=Scoring.SIGMOID,
        ),
        fixed={**AS_MLP, "norm_topk_prob": True},
    ),
}
