"""Llama, Mistral and Mixtral, SmolLM3, Arcee."""

from dataclasses import replace

from h2o_stream.native.abi import Activation
from h2o_stream.runtime.families.architecture import Architecture, ModelType, mlp_names

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
MODEL_TYPES = {
    "llama": ModelType(_LLAMA),
    "mistral": ModelType(_LLAMA, slides="all"),
    "mixtral": ModelType(
        _LLAMA.with_names(_MIXTRAL),
        slides="all",
        normalizes_experts=True,
        module_names=mlp_names("mlp.experts", "_exps") | {"ffn_gate_inp": "mlp.gate"},
    ),
}
