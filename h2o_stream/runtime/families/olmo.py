"""OLMo 1 to 3, OLMoE, FlexOlmo."""

from dataclasses import replace

from h2o_stream.native.abi import NormKind
from h2o_stream.runtime.families.architecture import AFTER_ONLY, AS_MLP, NAMES, Architecture, ModelType

_OLMO = Architecture(
    bare_norms=True,
    checkpoint_names={name: part for name, part in NAMES.items() if name[4:] not in ("_q_norm", "_k_norm")},
)

ARCHITECTURES = {
    "olmo2": replace(
        AFTER_ONLY,
        model_type=lambda parameters: "olmo3" if any(parameters.sliding) else "olmo2",
        full_every=4,
        local_plain=True,
    ),
    "olmoe": Architecture(),
}
MODEL_TYPES = {
    "olmo": ModelType(_OLMO, {"clip_qkv": None}, {"layer_norm_eps": 1e-5}, norm=NormKind.LAYER),
    "olmo2": ModelType(ARCHITECTURES["olmo2"]),
    "olmo3": ModelType(ARCHITECTURES["olmo2"], {"rope_theta": 500_000.0, "sliding_window": 4096}),
    "olmoe": ModelType(ARCHITECTURES["olmoe"], fixed=AS_MLP),
    "flex_olmo": ModelType(AFTER_ONLY, {"rope_theta": 500_000.0}, AS_MLP),
}
