"""Granite 3 and 4, with experts and with state spaces."""

from h2o_stream.runtime.families.architecture import Architecture, mlp_names, state_space

_GRANITE = Architecture(rope_rows_permuted=True, divides_logits=True, normalizes_experts=True)
_EXPERTS = mlp_names("block_sparse_moe.experts", "_exps") | {"ffn_gate_inp": "block_sparse_moe.router"}
_MIXER = state_space("mamba")
_SHARED = {
    f"ffn_{name}{kind}": f"shared_mlp.{part}_linear"
    for name, part in {"gate": "input", "up": "input", "down": "output"}.items()
    for kind in ("", "_shexp")
}

ARCHITECTURES = {
    "granite": _GRANITE,
    "granitemoe": _GRANITE.with_names(_EXPERTS),
    "granitehybrid": _GRANITE.with_names(
        _EXPERTS | _MIXER | _SHARED,
        model_type="granitemoehybrid",
        unrotated_if_original=True,
        stored_as_in_gguf={*_MIXER},
    ),
}
