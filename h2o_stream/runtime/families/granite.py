"""Granite 3 and 4, with experts and with state spaces; HyperCLOVA X, which has its factors."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from h2o_stream.runtime.families.architecture import (
    AFTER,
    AS_MLP,
    BEFORE,
    LATE_NORM,
    Architecture,
    ModelType,
    mlp_names,
    state_space,
)

_GRANITE = Architecture(rope_rows_permuted=True, divides_logits=True, normalizes_experts=True)
_EXPERTS = mlp_names("block_sparse_moe.experts", "_exps") | {"ffn_gate_inp": "block_sparse_moe.router"}
_MIXER = state_space("mamba")
_SHARED = {
    f"ffn_{name}{kind}": f"shared_mlp.{part}_linear"
    for name, part in {"gate": "input", "up": "input", "down": "output"}.items()
    for kind in ("", "_shexp")
}

_STACKED = {
    "ffn_gate_up_exps": "block_sparse_moe.input_linear",
    "ffn_down_exps": "block_sparse_moe.output_linear",
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
"""In checkpoints."""
_SINKS = {
    "ffn_gate_up_exps": "block_sparse_moe.experts.gate_up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.down_proj",
    "ffn_gate_inp": "block_sparse_moe.router",
    "attn_sinks": "self_attn.sinks",
}
"""With sliding windows."""

_HYBRID = _GRANITE.with_names(
    _EXPERTS | _MIXER,
    model_type="granitemoehybrid",
    unrotated_if_original=True,
    stored_as_in_gguf={*_MIXER},
)


def _dense_size(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without experts, there is only the MLP for all tokens."""
    return {} if config.get("num_local_experts") else {"inner_size": int(config["shared_intermediate_size"])}


ARCHITECTURES = {
    "granite": _GRANITE,
    "granitemoe": _GRANITE.with_names(_EXPERTS),
    "granitehybrid": _HYBRID.with_names(_SHARED),
}
MODEL_TYPES = {
    "granite": ModelType(_GRANITE),
    "granitemoe": ModelType(_GRANITE.with_names(_STACKED), fixed=AS_MLP),
    "granitemoeshared": ModelType(_GRANITE.with_names(_STACKED), fixed=AS_MLP),
    "granite_swa": ModelType(_GRANITE.with_names(_SINKS)),
    "granitemoehybrid": ModelType(
        _HYBRID.with_names(
            _STACKED | {"ffn_gate_up": "shared_mlp.input_linear", "ffn_down": "shared_mlp.output_linear"}
        ),
        fixed={**AS_MLP, "num_experts": None},
        numbers=_dense_size,
    ),
    "granitemoe_swa": ModelType(_GRANITE.with_names(_STACKED | _SINKS), fixed=AS_MLP),
    "hyperclovax": ModelType(
        replace(LATE_NORM, norms=BEFORE | AFTER, optional_norms=set(AFTER)).with_names(
            {"post_attention_norm": "post_norm1", "post_ffw_norm": "post_norm2"}
        ),
    ),
}
