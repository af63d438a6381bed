"""Qwen 2 and 3, and their hybrids with gated delta rules: Qwen3-Next, Qwen 3.5."""

from dataclasses import replace

from h2o_stream.runtime.families.architecture import LATE_NORM, MIXER_PARTS, Architecture, ModelType

_QWEN = Architecture()
_QWEN_2_MOE = Architecture(model_type="qwen2_moe")
_QWEN_3_MOE = Architecture(model_type="qwen3_moe", normalizes_experts=True)

_MIXER = {name: f"linear_attn.{part}" for name, part in MIXER_PARTS.items()}
_APART = {"attn_qkv": "qkv", "attn_gate": "z", "ssm_beta": "b", "ssm_alpha": "a"}
_FUSED = {"attn_qkv": "qkvz", "attn_gate": "qkvz", "ssm_ba": "ba"}
_HYBRID = LATE_NORM.with_names(
    _MIXER,
    norm_offset=1.0,
    gates_attention=True,
    normalizes_experts=True,
    stored_as_in_gguf={*_MIXER, *_APART, *_FUSED},
)
_QWEN_3_5 = _HYBRID.with_names(
    {name: f"linear_attn.in_proj_{part}" for name, part in _APART.items()}, interleaved_heads=True
)

ARCHITECTURES = {
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "qwen2moe": _QWEN_2_MOE,
    "qwen3moe": _QWEN_3_MOE,
    "qwen35": replace(_QWEN_3_5, model_type="qwen3_5_text"),
    "qwen35moe": replace(_QWEN_3_5, model_type="qwen3_5_moe_text"),
    "qwen3next": _HYBRID.with_names(
        {name: f"linear_attn.in_proj_{part}" for name, part in _FUSED.items()},
        model_type="qwen3_next",
        fused_by_key_head=True,
    ),
}
_QWEN_NEXT = _HYBRID.with_names({"ssm_qkvz": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"})
_SAVED_3_5 = replace(_QWEN_3_5, interleaved_heads=False)
MODEL_TYPES = {
    "qwen2": ModelType(_QWEN),
    "qwen3": ModelType(_QWEN),
    "qwen2_moe": ModelType(_QWEN_2_MOE),
    "qwen3_moe": ModelType(_QWEN_3_MOE),
    "qwen3_next": ModelType(_QWEN_NEXT),
    "qwen3_5_text": ModelType(_SAVED_3_5),
    "qwen3_5_moe_text": ModelType(_SAVED_3_5, fixed={"norm_topk_prob": True}),
    "mellum": ModelType(_QWEN_3_MOE),
}
