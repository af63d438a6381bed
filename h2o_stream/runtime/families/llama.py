"""Llama and types that compute the same; Mixtral and others with its names; SmolLM3, Arcee."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from h2o_stream.native.abi import Activation, NormKind, Scoring
from h2o_stream.runtime.families.architecture import AS_MLP, Architecture, ModelType, mlp_names

_LLAMA = Architecture(
    model_type=lambda parameters: "mixtral" if parameters.experts else "llama",
    rope_rows_permuted=True,
    normalizes_experts=True,
)
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
}

ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral3": replace(_LLAMA, model_type=lambda parameters: "ministral3" if parameters.temperature else "mistral"),
    "smollm3": Architecture(rope_rows_permuted=True, unrotated_every=4),
    "arcee": Architecture(rope_rows_permuted=True, activation=Activation.RELU_SQUARED),
}
_LLAMA_4 = Architecture(
    adjacent=True,
    bare_norms=True,
    heats_unrotated=True,
    scoring=Scoring.SIGMOID,
    weighs_inputs=True,
    transposed_experts=True,
    only_modules=True,
    unrotated_every=4,
).with_names(
    mlp_names("feed_forward")
    | mlp_names("feed_forward.experts", "_exps")
    | mlp_names("feed_forward.shared_expert", "_shexp")
    | {"ffn_gate_inp": "feed_forward.router"}
)


def _llama_4(config: Mapping[str, Any]) -> dict[str, Any]:
    heat = (float(config["attn_scale"]), int(config["floor_scale"])) if config.get("attn_temperature_tuning") else None
    return {"inner_size": int(config["intermediate_size_mlp"]), "temperature": heat}


MODEL_TYPES = {
    "llama4_text": ModelType(_LLAMA_4, fixed={**AS_MLP, "num_shared_experts": 1}, numbers=_llama_4),
    "llama": ModelType(_LLAMA),
    "internlm3": ModelType(_LLAMA),
    "iquestcoder": ModelType(_LLAMA),
    "emu3_text_model": ModelType(_LLAMA),
    "mistral": ModelType(_LLAMA, slides_everywhere=True),
    "ministral": ModelType(_LLAMA),
    "ministral3": ModelType(_LLAMA, slides_everywhere=True),
    "mixtral": ModelType(_LLAMA.with_names(_MIXTRAL), fixed=AS_MLP, slides_everywhere=True),
    "cwm": ModelType(_LLAMA),
    "smollm3": ModelType(ARCHITECTURES["smollm3"]),
    "arcee": ModelType(ARCHITECTURES["arcee"]),
    "phimoe": ModelType(
        _LLAMA.with_names(_MIXTRAL, norm=NormKind.LAYER, scoring=Scoring.SPARSE_MIXER, normalizes_experts=False),
        fixed=AS_MLP,
        slides_everywhere=True,
    ),
    "minimax_m2": ModelType(
        _LLAMA.with_names(
            _MIXTRAL | {"exp_probs_b": "block_sparse_moe.e_score_correction_bias"}, scoring=Scoring.SIGMOID
        ),
        fixed=AS_MLP,
    ),
}
