"""gpt-oss."""

from h2o_stream.native.abi import Activation
from h2o_stream.runtime.families.architecture import LATE_NORM

ARCHITECTURES = {
    "gpt-oss": LATE_NORM.with_names(
        {"attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router"},
        model_type="gpt_oss",
        activation=Activation.CLAMPED_SWIGLU,
        activation_parameters=(1.702, 7.0, 1.0),
        full_every=2,
        whole_ramp=False,
        normalizes_experts=True,
        interleaved_experts=True,
    )
}
