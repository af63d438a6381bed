"""Falcon-H1 and Bamba: attention and state spaces, side by side in each layer or one after another."""

from collections.abc import Mapping
from typing import Any

from h2o_stream.runtime.families.architecture import FINAL_NORM, Architecture, ModelType, mlp_names, state_space
from h2o_stream.runtime.parameters import Multipliers

_MIXER = state_space("mamba")
_FALCON = Architecture(
    model_type="falcon_h1", config=lambda *_: {"mamba_norm_before_gate": False}, stored_as_in_gguf={*_MIXER}
).with_names(
    _MIXER
    | mlp_names("feed_forward")
    | {"ssm_factors": "mamba.mup_vector", "ffn_norm": "pre_ff_layernorm", FINAL_NORM: "model.final_layernorm"}
)


def _multipliers(config: Mapping[str, Any]) -> dict[str, Any]:
    names = ("attention_in", "key", "attention_out", "ssm_in", "ssm_out")
    attention_in, key, attention_out, mixer_in, mixer_out = (
        float(config.get(f"{name}_multiplier") or 1) for name in names
    )
    gate, down = (float(factor) for factor in config.get("mlp_multipliers") or (1, 1))
    parts = tuple(float(factor) for factor in config.get("ssm_multipliers") or (1,) * 5)
    return {"multipliers": Multipliers(attention_in, key, attention_out, gate, down, mixer_in, parts, mixer_out)}


ARCHITECTURES = {"falcon-h1": _FALCON}
MODEL_TYPES = {
    "falcon_h1": ModelType(_FALCON, numbers=_multipliers),
    "bamba": ModelType(_FALCON, fixed={"mamba_norm_before_gate": False}),
}
