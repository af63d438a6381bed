"""OLMo 1 to 3, OLMoE, FlexOlmo."""

from dataclasses import replace

from h2o_stream.native.abi import NormKind
from h2o_stream.runtime.families.architecture import AFTER_ONLY, AS_MLP, MIXER_PARTS, NAMES, Architecture, ModelType

_OLMO = Architecture(
    norm=NormKind.LAYER,
    bare_norms=True,
    checkpoint_names={name: part for name, part in NAMES.items() if name[4:] not in ("_q_norm", "_k_norm")},
)

_HYBRID = replace(
    AFTER_ONLY,
    mixer_norms={"before_attention": "attn_norm", "before_mlp": "post_attention_norm"},
    renamed={"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"},
).with_names(
    {f"ssm_{name}": f"linear_attn.{name}_proj" for name in ("q", "k", "v")}
    | {"attn_gate": "linear_attn.g_proj", "ssm_beta": "linear_attn.b_proj", "ssm_alpha": "linear_attn.a_proj"}
    | {name: f"linear_attn.{part}" for name, part in MIXER_PARTS.items()}
    | {f"ssm_conv1d.{name}": f"linear_attn.{name}_conv1d" for name in ("q", "k", "v")}
    | {"ssm_norm": "linear_attn.o_norm", "ssm_out": "linear_attn.o_proj"}
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
    "olmo": ModelType(_OLMO, fixed={"layer_norm_eps": 1e-5}),
    "olmo2": ModelType(ARCHITECTURES["olmo2"]),
    "olmo3": ModelType(ARCHITECTURES["olmo2"], {"rope_theta": 5e5, "rope_local_base_freq": 5e5}),
    "olmoe": ModelType(ARCHITECTURES["olmoe"], fixed=AS_MLP),
    "olmo_hybrid": ModelType(_HYBRID, fixed={"mixer_epsilon": 1e-5}),
    "flex_olmo": ModelType(AFTER_ONLY, fixed=AS_MLP),
}
