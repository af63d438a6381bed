"""Families of a few lines."""

from dataclasses import replace

from h2o_stream.native.abi import Activation
from h2o_stream.runtime.families.architecture import AFTER_ONLY, LATE_NORM, Architecture, ModelType

_PHI_3 = Architecture(fused_mlp=True).with_names({"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"})
_STARCODER_2 = Architecture(activation=Activation.GELU_TANH).with_names(
    {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
)

ARCHITECTURES = {
    "exaone4": replace(AFTER_ONLY, full_every=4, rotates_sliding=True),
    "phi3": _PHI_3,
    "seed_oss": LATE_NORM,
    "stablelm": Architecture(),
    "starcoder2": _STARCODER_2,
}
MODEL_TYPES = {"phi3": ModelType(_PHI_3, slides="all"), "starcoder2": ModelType(_STARCODER_2, tied=True, slides="all")}
