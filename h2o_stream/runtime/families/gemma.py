"""Gemma 1 to 4, and 3n."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from h2o_stream.models.gguf import GgufFile
from h2o_stream.native.abi import MAX_VERSIONS, Activation
from h2o_stream.runtime.families.architecture import AFTER, BEFORE, LAYER_EMBEDDINGS, SANDWICH, Architecture, ModelType
from h2o_stream.runtime.parameters import AltUpParameters, LayerShape, Parameters

_OWN_EMBEDDINGS = {
    LAYER_EMBEDDINGS: "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar",
}
"""Names of embeddings of tokens in each layer, and of factors on what layers give."""

_PARALLEL_EXPERTS = {
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps": "experts.gate_up_proj",
    "ffn_down_exps": "experts.down_proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
"""Names of experts beside an MLP."""

_VERSIONS = range(MAX_VERSIONS - 1)
_ALTUP = {
    **{f"altup_proj.{number}": f"model.altup_projections.{number}" for number in _VERSIONS},
    **{f"altup_unembd_proj.{number}": f"model.altup_unembed_projections.{number}" for number in _VERSIONS},
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": "altup.correct_output_scale",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
"""Names of what mixes versions of the residual stream, and of residuals of low rank."""


def _config(file: GgufFile, parameters: Parameters) -> dict[str, Any]:
    """Embeddings of layers, versions of the residual stream, layers that differ."""
    table, altup = file.tensors.get(f"{LAYER_EMBEDDINGS}.weight"), parameters.altup
    entries: dict[str, Any] = {
        "num_kv_shared_layers": parameters.shared_kv_layers,
        "hidden_size_per_layer_input": parameters.own_embedding,
        "vocab_size_per_layer_input": table.shape[0] if table else 0,
    }
    if parameters.experts:
        entries["enable_moe_block"] = True
    if altup:
        deviations = (-math.inf if x is None else x for x in altup.gate_deviations)
        entries |= {
            "altup_num_inputs": altup.count,
            "altup_active_idx": altup.active,
            "laurel_rank": altup.rank,
            "activation_sparsity_pattern": [math.erfc(-x / math.sqrt(2)) / 2 for x in deviations],
        }
    return entries | (_layers(file, parameters) if parameters.layer_shapes else {})


def _layers(file: GgufFile, parameters: Parameters) -> dict[str, Any]:
    """Entries of a config for layers that differ.

    Raises:
        ValueError: their MLPs are wide in another way than transformers knows.
    """
    shapes, shared = parameters.layer_shapes, parameters.shared_kv_layers
    whole = [number for number, window in enumerate(parameters.sliding) if window is None]
    sliding = next((shape for number, shape in enumerate(shapes) if number not in whole), shapes[0])
    wide = [shape.inner_size // shapes[0].inner_size for shape in shapes]
    if wide not in ([1] * len(wide), [1] * (len(wide) - shared) + [2] * shared):
        raise ValueError(f"its layers have MLPs of {[shape.inner_size for shape in shapes]}")
    return {
        "head_dim": sliding.head_size,
        "num_key_value_heads": sliding.kv_heads,
        "per_layer_config": {
            number: {"head_dim": shapes[number].head_size, "num_key_value_heads": shapes[number].kv_heads}
            for number in whole
        },
        "attention_k_eq_v": any(
            f"blk.{number}.attn_v.weight" not in file.tensors for number in whole if number < len(shapes) - shared
        ),
        "intermediate_size": shapes[0].inner_size,
        "use_double_wide_mlp": 2 in wide,
    }


_GEMMA = Architecture(activation=Activation.GELU_TANH, scales_embeddings=True, norm_offset=1.0)
_SANDWICHED = _GEMMA.with_names(SANDWICH, norms=BEFORE | AFTER)
_GEMMA_2 = replace(_SANDWICHED, full_every=2, scales_by_hidden_at_layers=46, softcaps=(50.0, 30.0))
_GEMMA_3 = replace(
    _SANDWICHED,
    model_type="gemma3_text",
    full_every=6,
    local_theta=10_000.0,
    local_plain=True,
    scales_by_hidden_at_layers=62,
)
_WITH_OWN_EMBEDDINGS = _SANDWICHED.with_names(
    _OWN_EMBEDDINGS, config=_config, norm_offset=0.0, local_plain=True, normed_values=True, scaling=1.0,
    softcaps=(0.0, 30.0), local_theta=10_000.0,
)  # fmt: skip

_GEMMA_3N = _WITH_OWN_EMBEDDINGS.with_names(_ALTUP, model_type="gemma3n_text", rounds_constants=True)
_GEMMA_4 = _WITH_OWN_EMBEDDINGS.with_names(_PARALLEL_EXPERTS, model_type="gemma4_text", normalizes_experts=True)


def _shared(config: Mapping[str, Any]) -> dict[str, int]:
    names = {"shared_kv_layers": "num_kv_shared_layers", "own_embedding": "hidden_size_per_layer_input"}
    if config.get("hidden_size_per_layer_input"):
        names["own_vocabulary"] = "vocab_size_per_layer_input"
    return {name: int(config.get(entry) or 0) for name, entry in names.items()}


def _altup(config: Mapping[str, Any]) -> dict[str, Any]:
    layers, sizes = int(config["num_hidden_layers"]), config["intermediate_size"]
    heads = int(config["head_dim"]), int(config["num_key_value_heads"])
    sizes = sizes if isinstance(sizes, list) else [sizes] * layers
    shares = config["activation_sparsity_pattern"]
    return _shared(config) | {
        "inner_size": int(sizes[0]),
        "layer_shapes": tuple(LayerShape(*heads, int(size)) for size in sizes),
        "altup": AltUpParameters(
            int(config["altup_num_inputs"]),
            int(config["altup_active_idx"]),
            int(config["laurel_rank"]),
            tuple(NormalDist().inv_cdf(share) if share > 0 else None for share in shares),
            bool(config.get("altup_correct_scale", True)),
        ),
    }


def _shapes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of Gemma 4, some layers of which have larger heads, or are wider."""
    shared, count, per_layer = _shared(config), int(config["num_hidden_layers"]), config.get("per_layer_config")
    if config["layer_types"][-1] != "full_attention":
        raise ValueError("its last layer does not see everything")
    if per_layer is None:
        whole = {"head_dim": config["global_head_dim"]}
        if config["attention_k_eq_v"] and config.get("num_global_key_value_heads"):
            whole["num_key_value_heads"] = config["num_global_key_value_heads"]
        per_layer = {number: whole for number, kind in enumerate(config["layer_types"]) if kind == "full_attention"}
    sizes = {int(number): entries for number, entries in per_layer.items()}
    wide = shared["shared_kv_layers"] if config.get("use_double_wide_mlp") else 0
    shapes = []
    for number in range(count):
        layer = {**config, **sizes.get(number, {})}
        factor = 2 if number >= count - wide else 1
        shapes.append(
            LayerShape(
                int(layer["head_dim"]), int(layer["num_key_value_heads"]), factor * int(config["intermediate_size"])
            )
        )
    return {**shared, "layer_shapes": tuple(shapes)}


def _older_activation(config: Mapping[str, Any]) -> dict[str, str]:
    """The first files say the one, and were trained with the other."""
    return {"hidden_act": "gelu_pytorch_tanh"} if config.get("hidden_act") == "gelu" else {}


ARCHITECTURES = {
    "gemma": _GEMMA,
    "gemma2": _GEMMA_2,
    "gemma3": _GEMMA_3,
    "gemma3n": _GEMMA_3N,
    "gemma4": _GEMMA_4,
}
_TWO_ROPES = {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
_GLOBAL = {"global_head_dim": 512, "enable_moe_block": False, "attention_k_eq_v": False}
MODEL_TYPES = {
    "gemma": ModelType(_GEMMA, older=_older_activation),
    "gemma2": ModelType(_GEMMA_2),
    "gemma3_text": ModelType(_GEMMA_3, _TWO_ROPES),
    "gemma3n_text": ModelType(
        replace(_GEMMA_3N, full_every=5),
        _TWO_ROPES,
        numbers=_altup,
    ),
    "gemma4_text": ModelType(_GEMMA_4, _GLOBAL, numbers=_shapes),
    "gemma4_unified_text": ModelType(
        _GEMMA_4,
        _GLOBAL,
        {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "enable_moe_block": False},
        numbers=_shapes,
    ),
    "vaultgemma": ModelType(replace(_GEMMA_2, norms=BEFORE).with_names({"ffn_norm": "pre_feedforward_layernorm"})),
}
