"""Nemotron, and Nemotron-H, whose layers are one thing each."""

from dataclasses import replace

from h2o_stream.native.abi import Activation, NormKind, Scoring
from h2o_stream.runtime.families.architecture import EMBEDDING, FINAL_NORM, Architecture, ModelType, state_space

_MIXER = state_space("mixer")
_NEMOTRON_H = Architecture(
    model_type="nemotron_h",
    config=lambda *_: {"time_step_min": 0.0},
    activation=Activation.RELU_SQUARED,
    scoring=Scoring.SIGMOID,
    unrotated_every=1,
    norm=NormKind.RMS,
    one_part=True,
    ungated_experts=True,
    stored_as_in_gguf={*_MIXER, "exp_probs_b"},
).with_names(
    _MIXER
    | {f"attn_{name}": f"mixer.{name}_proj" for name in ("q", "k", "v")}
    | {
        f"ffn_{name}{kind}": f"mixer.{module}{name}_proj"
        for name in ("up", "down")
        for kind, module in {"": "", "_exps": "experts.", "_shexp": "shared_experts."}.items()
    }
    | {
        EMBEDDING: "model.embeddings",
        FINAL_NORM: "model.norm_f",
        "attn_norm": "norm",
        "attn_output": "mixer.o_proj",
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b": "mixer.gate.e_score_correction_bias",
    }
)

_NEMOTRON = Architecture(activation=Activation.RELU_SQUARED, norm=NormKind.LAYER, norm_offset=1.0)

ARCHITECTURES = {"nemotron": _NEMOTRON, "nemotron_h": _NEMOTRON_H, "nemotron_h_moe": _NEMOTRON_H}
MODEL_TYPES = {
    "nemotron": ModelType(_NEMOTRON),
    "nemotron_h": ModelType(
        # Not its folders: transformers' prompts limit steps otherwise than its single tokens. Modules are compared.
        replace(_NEMOTRON_H, layers="backbone.layers", only_modules=True).with_names(
            {EMBEDDING: "backbone.embeddings", FINAL_NORM: "backbone.norm_f"}
        ),
        {"norm_topk_prob": True, "time_step_min": 0.001},
        {"sliding_window": None},
    ),
}
