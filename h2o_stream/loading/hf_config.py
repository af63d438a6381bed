"""transformers' config of a model in a GGUF file, from the same parameters that describe it without transformers.

Families call the same numbers by names of their own: a config gets those for which its class has a field.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from h2o_stream.errors import UnsupportedModelError
from h2o_stream.loading.hf_rope import set_rope
from h2o_stream.models.gguf import GgufFile
from h2o_stream.native.description import DescriptionError
from h2o_stream.runtime.families import ARCHITECTURES
from h2o_stream.runtime.gguf_checks import check_sizes
from h2o_stream.runtime.parameters import ExpertParameters, MixerParameters, Parameters
from h2o_stream.runtime.sources import ModelFile

_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}
"""llama.cpp's names of tokens, by transformers'."""

_FLAGS = {
    "attention_bias": "attn_q.bias",
    **dict.fromkeys(("use_qkv_bias", "qkv_bias"), "attn_q.bias"),
    "attention_out_bias": "attn_output.bias",
    "use_bias": "attn_output.bias",
    "mlp_bias": "ffn_down.bias",
    "use_qk_norm": "attn_q_norm.weight",
    "qk_layernorm": "attn_q_norm.weight",
    "use_expert_bias": "exp_probs_b.bias",
    "conv_bias": "shortconv.conv.bias",
    "mamba_conv_bias": "ssm_conv1d.bias",
    "use_conv_bias": "ssm_conv1d.bias",
    "mamba_proj_bias": "ssm_in.bias",
    "mamba_rms_norm": "ssm_norm.weight",
}
"""Fields that say whether a model has such weights."""


def hf_config(file: GgufFile, parameters: Parameters) -> PretrainedConfig:
    """The config of a model.

    Args:
        file: a file whose architecture has a row in the table.
        parameters: what the file says of the model.

    Raises:
        UnsupportedModelError: transformers has no equivalent of its RoPE.
        DescriptionError: layers have sizes that transformers does not know.
    """
    row = ARCHITECTURES[file.architecture]
    kind = CONFIG_MAPPING[row.transformers_type(parameters) or file.architecture]
    values, names = _values(file, parameters), {field.name for field in fields(kind)}
    known = {name: value for name, value in values.items() if name in names} | {**row.config(file, parameters)}
    if values["head_dim"] * parameters.query_heads != parameters.hidden_size:
        known.setdefault("head_dim", values["head_dim"])  # also of a class without a field for it
    config = kind(**known, **_identity(file))
    if getattr(config, "rope_parameters", None):
        set_rope(config, file, parameters)
    return config


def _identity(file: GgufFile) -> dict[str, Any]:
    """What computes nothing, and is in the names of models that states have had since the first version."""
    metadata = file.metadata
    known = {"_model_name_or_path": "general.name", "unk_token_id": "tokenizer.ggml.unknown_token_id"}
    return {name: metadata[key] for name, key in known.items() if key in metadata}


def _values(file: GgufFile, parameters: Parameters) -> dict[str, Any]:
    """Values by the names of all families."""
    kinds = [_kind(file, parameters, number) for number in range(parameters.num_layers)]
    metadata = file.metadata
    ends = {name.split(".", 2)[-1] for name in file.tensors if name.startswith("blk.")}
    return {
        **{field: end in ends for field, end in _FLAGS.items()},
        **{f"{name}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKENS.items()},
        "vocab_size": parameters.vocabulary,
        "hidden_size": parameters.hidden_size,
        "intermediate_size": parameters.inner_size,
        "num_hidden_layers": parameters.num_layers,
        "num_attention_heads": parameters.query_heads,
        "num_key_value_heads": parameters.kv_heads,
        "head_dim": parameters.latent.rope_size if parameters.latent else parameters.head_size,
        "max_position_embeddings": parameters.context,
        "tie_word_embeddings": parameters.tied,
        **_named("rms_norm_eps layer_norm_eps norm_eps norm_epsilon layer_norm_epsilon", parameters.epsilon),
        **_named("layer_types layers_block_type", kinds),
        "sliding_window": next(filter(None, parameters.sliding), None),
        "no_rope_layers": [int(rope is not None) for rope in parameters.ropes],
        "position_embedding_type": "rope" if any(parameters.ropes) else None,
        "query_pre_attn_scalar": round(parameters.scaling**-2),
        "attention_multiplier": parameters.scaling,
        "embedding_multiplier": parameters.embedding_scale,
        "residual_multiplier": parameters.residual_scale,
        "logits_scaling": 1 / parameters.logit_scale,
        "logit_scale": parameters.logit_scale,
        "attn_logit_softcapping": parameters.softcap or None,
        "final_logit_softcapping": parameters.logit_softcap or None,
        **_latent(parameters),
        **(_experts(file, parameters.experts) if parameters.experts else {"num_local_experts": 0}),
        "shared_intermediate_size": (parameters.experts and parameters.experts.shared_size) or parameters.inner_size,
        "first_k_dense_replace": _num_dense(file, parameters),
        **(_mixer(parameters.mixer, parameters.hidden_size) if parameters.mixer else {}),
        **{name: size for size in _convolution(file) for name in _CONVOLUTION_SIZES},
    }


def _named(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


def _kind(file: GgufFile, parameters: Parameters, number: int) -> str:
    """What transformers calls the kind of a layer."""
    parts = {
        "attn_output": "full_attention" if parameters.sliding[number] is None else "sliding_attention",
        "shortconv.in_proj": "conv",
        "ssm_in": "linear_attention",
        "ssm_conv1d": "linear_attention",
        "ffn_gate_inp": "moe",
    }
    return next((kind for part, kind in parts.items() if f"blk.{number}.{part}.weight" in file.tensors), "mlp")


def _latent(parameters: Parameters) -> dict[str, Any]:
    if not (sizes := parameters.latent):
        return {}
    return {
        "q_lora_rank": parameters.latent_queries or None,
        "kv_lora_rank": sizes.rank,
        "qk_rope_head_dim": sizes.rope_size,
        "qk_nope_head_dim": sizes.nope_size,
        "v_head_dim": sizes.value_size,
    }


def _num_dense(file: GgufFile, parameters: Parameters) -> int:
    """How many layers come before the first with experts."""
    layers = range(parameters.num_layers)
    return next((number for number in layers if f"blk.{number}.ffn_gate_inp.weight" in file.tensors), len(layers))


def _experts(file: GgufFile, experts: ExpertParameters) -> dict[str, Any]:
    first = min(int(name.split(".")[1]) for name in file.tensors if ".ffn_gate_inp." in name)
    shared = file.metadata.get(f"{file.architecture}.expert_shared_count") or experts.shared_size // experts.inner_size
    return {
        **_named("num_experts num_local_experts n_routed_experts moe_num_experts", experts.count),
        **_named("num_experts_per_tok moe_k moe_topk top_k_experts", experts.chosen),
        "moe_intermediate_size": experts.inner_size,
        **_named("shared_expert_intermediate_size moe_shared_expert_intermediate_size", experts.shared_size),
        **_named("n_shared_experts moe_num_shared_experts", shared),
        "norm_topk_prob": experts.normalized,
        "routed_scaling_factor": experts.scale,
        "n_group": experts.groups or 1,
        "topk_group": experts.chosen_groups or 1,
        "topk_method": "group_limited_greedy" if experts.groups else "greedy",
        **_named("moe_layer_start_index num_dense_layers", first),
        "moe_layer_interval": file.metadata.get(f"{file.architecture}.interleave_moe_layer_step") or 1,
    }


def _mixer(sizes: MixerParameters, hidden: int) -> dict[str, Any]:
    """Sizes of Mamba-2, and of gated delta rules."""
    inner = sizes.heads * sizes.value_size
    return {
        **_named("mamba_n_heads mamba_num_heads linear_num_value_heads", sizes.heads),
        **_named("mamba_d_head mamba_head_dim linear_value_head_dim", sizes.value_size),
        **_named("mamba_n_groups n_groups linear_num_key_heads", sizes.key_heads),
        **_named("mamba_d_state ssm_state_size linear_key_head_dim", sizes.key_size),
        "mamba_d_ssm": inner,
        "mamba_expand": inner // hidden,
    }


_CONVOLUTION_SIZES = ("mamba_d_conv", "conv_kernel", "linear_conv_kernel_dim", "conv_L_cache")


def _convolution(file: GgufFile) -> Iterator[int]:
    """The size of convolutions, if there are any."""
    sizes = (tensor.shape[-1] for name, tensor in file.tensors.items() if name.endswith("conv1d.weight"))
    yield from {*sizes, *(x.shape[-1] for name, x in file.tensors.items() if name.endswith("shortconv.conv.weight"))}


def described(name: str, file: GgufFile) -> ModelFile | None:
    """What describes a GGUF file; None if only transformers' own reader knows it.

    Raises:
        UnsupportedModelError: it has something that is not known here.
    """
    if file.architecture not in ARCHITECTURES:
        return None
    try:
        return ModelFile(name, file.path, "float32")
    except DescriptionError as error:
        raise UnsupportedModelError(f"{file.path.name} cannot be served: {error}") from error


def config_by_transformers(file: GgufFile) -> Any:
    """The config of a file that only transformers' own reader knows.

    Raises:
        UnsupportedModelError: it does not, or would read it wrongly.
    """
    check_sizes(file)
    kind = file.metadata.get(f"{file.architecture}.rope.scaling.type", "none")
    if kind != "none" or "rope_freqs.weight" in file.tensors:
        raise UnsupportedModelError(f"{file.path.name} has RoPE scaling of type {kind!r}; its output would be wrong")
    try:
        return AutoConfig.from_pretrained(file.path.parent, gguf_file=file.path.name)
    except ValueError as error:
        raise UnsupportedModelError(f"{file.path.name} cannot be served: {error}") from error
