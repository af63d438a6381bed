"""Falcon-H1: attention and a state space side by side in each layer."""

from h2o_stream.runtime.families.architecture import FINAL_NORM, Architecture, mlp_names, state_space

_MIXER = state_space("mamba")

ARCHITECTURES = {
    "falcon-h1": Architecture(
        model_type="falcon_h1", config=lambda *_: {"mamba_norm_before_gate": False}, stored_as_in_gguf={*_MIXER}
    ).with_names(
        _MIXER | mlp_names("feed_forward") | {"ffn_norm": "pre_ff_layernorm", FINAL_NORM: "model.final_layernorm"}
    )
}
