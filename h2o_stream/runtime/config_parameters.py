"""The parameters of a checkpoint, from its ``config.json``; what is not certain is left to transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from h2o_stream.native.abi import Activation, NormKind, Scoring
from h2o_stream.native.description import DescriptionError
from h2o_stream.native.latent import LatentSizes
from h2o_stream.runtime.config_ropes import Config, latent_magnitude, ropes_of_config
from h2o_stream.runtime.families import MODEL_TYPES, published
from h2o_stream.runtime.families.architecture import Architecture, ModelType
from h2o_stream.runtime.parameters import MAX_LAYERS, ExpertParameters, MixerParameters, Parameters, check_range

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "gelu": Activation.GELU_ERF,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
    "xielu": Activation.XIELU,
}

_ACTIVATION_NAMES = "hidden_act hidden_activation mlp_hidden_act activation_function"

_NEUTRAL = ("quantization_config", "moe_router_logit_softcapping")
"""Entries that change what is computed, unless they are missing or false."""

_LATENT_EPSILON = 1e-6
"""Epsilon of norms of latent vectors in all classes of transformers, whatever a config says of other norms."""

_SHARED_SIZES = """
shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size
"""

_KINDS = {
    "full_attention", "sliding_attention", "linear_attention", "conv", "mamba", "attention", "moe", "mlp",
    "chunked_attention",
}  # fmt: skip
"""Of layers."""


class Entries(dict[str, Any]):
    """The entries of ``config.json``, which model types have under names of their own."""

    def first(self, names: str) -> Any:
        """The first of these entries that is there, and not null; None if there is none."""
        return next((value for name in names.split() if (value := self.get(name)) is not None), None)

    def number(self, names: str, otherwise: float = 0.0) -> float:
        """The first of these entries as a number."""
        value = self.first(names)
        return otherwise if value is None else float(value)

    def count(self, names: str, otherwise: int | None = None) -> int:
        """The first of these as a whole number, which a list may give for each layer; LookupError if there is none."""
        value = self.first(names)
        if value is None:
            value = otherwise
        if value is None:
            raise LookupError(names)
        if isinstance(value, list) and (len({*value}) == 1 or names == "intermediate_size"):
            value = max(value)
        return int(value)


def parameters_of_config(config: Config) -> tuple[Architecture, Parameters]:
    """The architecture of a checkpoint, and its parameters.

    Raises:
        DescriptionError: its type or a parameter is not known here, or one is missing.
    """
    try:
        kind, entries = _entries(config)
        architecture = _architecture(kind, entries)
        return architecture, Parameters(**_numbers(kind, architecture, entries))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DescriptionError(f"a parameter is missing or no number: {error}") from error


def _entries(config: Config) -> tuple[ModelType, Entries]:
    """The row of a checkpoint, and its entries with those that it leaves out; of one with images, those for text."""
    text, names = config.get("text_config"), config.get("architectures") or []
    text_config = config if text is None else {**text, "tie_word_embeddings": config.get("tie_word_embeddings", True)}
    kind = MODEL_TYPES.get(str(text_config.get("model_type")))
    ends = "ForCausalLM" if text is None else ("ForCausalLM", "ForConditionalGeneration")
    if kind is None or not (isinstance(names, list) and all(str(name).endswith(ends) for name in names)):
        raise DescriptionError(f"{text_config.get('model_type')} is not in the table of checkpoints")
    for key in _NEUTRAL:
        is_ours = key == "quantization_config" and (config.get(key) or {}).get("quant_method") in ("h2o", "h2o-blocks")
        if config.get(key) and not is_ours:
            raise DescriptionError(f"its {key} is {config[key]}")
    if text_config.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise DescriptionError("its tokens attend to later ones")
    of_class = published().get(str(text_config["model_type"]), {})
    defaults, renamed = {**of_class.get("defaults", {}), **kind.defaults}, of_class.get("renamed", {})
    if defaults.get("rope_theta", 0) is None and not (
        text_config.get("rope_parameters") or text_config.get("rope_scaling")
    ):
        raise DescriptionError("its config says nothing of RoPE")
    text_config = {renamed[name]: value for name, value in text_config.items() if name in renamed} | {**text_config}
    return kind, Entries({**defaults, **text_config, **kind.older(text_config), **kind.fixed})


def _architecture(kind: ModelType, entries: Entries) -> Architecture:
    """What the row says, with what it leaves to entries."""
    architecture, name = kind.architecture, entries.first(_ACTIVATION_NAMES)
    activation, parallel = architecture.activation, entries.first("use_parallel_residual")
    reorders = entries.first("rope_interleave")
    if activation == Activation.CLAMPED_SWIGLU:
        parameters = entries.number("swiglu_alpha", 1.702), entries.number("swiglu_limit", 7.0), 1.0
        return replace(architecture, activation_parameters=parameters)
    if name is not None and name not in _ACTIVATIONS:
        raise DescriptionError(f"its activation is {name}")
    return replace(
        architecture,
        activation=activation if name is None else _ACTIVATIONS[name],
        parallel=architecture.parallel if parallel is None else bool(parallel),
        adjacent=architecture.adjacent and reorders is not False,
        bare_norms=architecture.bare_norms and entries.get("use_qk_norm") is not False,
        reorders_pairs=reorders,
        stored_as_in_gguf=(),
    )


def _numbers(kind: ModelType, architecture: Architecture, entries: Entries) -> dict[str, Any]:
    """The fields of `Parameters`."""
    hidden, heads = entries.count("hidden_size"), entries.count("num_attention_heads")
    layers = entries.count("num_hidden_layers", len(entries.get("layers_block_type") or ()))
    check_range(layers, "num_hidden_layers", MAX_LAYERS)
    latent, sliding = _latent(entries), _sliding(kind, entries, layers)
    head_size = latent.head_size if latent else entries.count("head_dim", hidden // heads)
    scale = hidden**0.5 if architecture.scales_embeddings or entries.get("mup_enabled") else 1.0
    rope = entries.first("rope_parameters rope_scaling") or {}
    numbers = {
        "num_layers": layers,
        "hidden_size": hidden,
        "inner_size": entries.count("intermediate_size", 0),
        "vocabulary": entries.count("vocab_size"),
        "query_heads": heads,
        "kv_heads": heads if latent else entries.count("num_key_value_heads", heads),
        "head_size": head_size,
        "norm": architecture.norm or NormKind.RMS,
        "epsilon": float(entries.first("rms_norm_eps norm_eps layer_norm_eps norm_epsilon layer_norm_epsilon")),
        "context": entries.count("max_position_embeddings"),
        "tied": bool(entries.get("tie_word_embeddings", False)),
        "scaling": _scaling(architecture, entries, head_size, rope),
        "sliding": sliding,
        "softcap": entries.number("attn_logit_softcapping"),
        "logit_softcap": entries.number("final_logit_softcapping"),
        "embedding_scale": entries.number("embedding_multiplier scale_emb", scale),
        "residual_scale": entries.number("residual_multiplier", 1.0),
        "logit_scale": entries.number("logit_scale lm_head_multiplier", 1.0) / entries.number("logits_scaling", 1.0),
        "temperature": (float(rope["llama_4_scaling_beta"]), int(rope["original_max_position_embeddings"]))
        if rope.get("llama_4_scaling_beta")
        else None,
        "norms_after_rope": architecture.norms_after_rope,
        "clip": entries.number("clip_qkv"),
        "value_scale": entries.number("attention_value_scale", 1.0),
        "value_size": 0 if latent else entries.count("v_head_dim", 0),
        "experts": _experts(architecture, entries),
        "latent": latent,
        "latent_queries": entries.count("q_lora_rank", 0) if latent else 0,
        "latent_epsilon": _LATENT_EPSILON,
        "mixer": _mixer(entries, hidden),
        **kind.numbers(entries),
    }
    shapes = numbers.get("layer_shapes") or ()
    sizes = [shape.head_size for shape in shapes] or [latent.rope_size if latent else head_size] * layers
    return {"ropes": ropes_of_config(entries, architecture, sizes, sliding), **numbers}


def _scaling(architecture: Architecture, entries: Entries, head_size: int, rope: Mapping[str, Any]) -> float:
    """The factor on queries times keys; a latent attention has YaRN's magnitude in it."""
    scaling = entries.first("attention_multiplier")
    plain = architecture.scaling or entries.number("query_pre_attn_scalar", head_size) ** -0.5
    magnitude = latent_magnitude(rope) if entries.get("kv_lora_rank") else 1.0
    return (plain if scaling is None else float(scaling)) * magnitude


def _latent(entries: Entries) -> LatentSizes | None:
    if not entries.get("kv_lora_rank"):
        return None
    rank, rope, nope, value = (
        entries.count(name) for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    return LatentSizes(rank, rope, nope, value)


def _experts(architecture: Architecture, entries: Entries) -> ExpertParameters | None:
    count = entries.count("num_experts num_local_experts n_routed_experts moe_num_experts", 0)
    if not count or entries.get("enable_moe_block") is False:
        return None
    inner = entries.count("moe_intermediate_size intermediate_size")
    shared = entries.count("n_shared_experts num_shared_experts moe_num_shared_experts num_shared_expert", 0) * inner
    groups = entries.count("n_group", 0)
    chosen = entries.count("topk_group", groups)
    if groups <= chosen or entries.get("topk_method") == "greedy":
        groups = chosen = 0
    return ExpertParameters(
        count=count,
        chosen=entries.count("num_experts_per_tok moe_topk moe_k top_k_experts"),
        inner_size=inner,
        shared_size=entries.count(_SHARED_SIZES, shared),
        scoring=architecture.scoring,
        normalized=bool(entries.get("norm_topk_prob", architecture.normalizes_experts)),
        scale=entries.number("routed_scaling_factor route_scale router_scaling_factor moe_routed_scaling_factor", 1.0),
        groups=groups,
        chosen_groups=chosen,
        jitter=entries.number("router_jitter_noise") if architecture.scoring == Scoring.SPARSE_MIXER else 0.0,
    )


def _mixer(entries: Entries, hidden: int) -> MixerParameters | None:
    if heads := entries.count("linear_num_value_heads", 0):
        keys, key_name, value_name = (f"linear_{name}" for name in ("num_key_heads", "key_head_dim", "value_head_dim"))
        scale = 2.0 if entries.get("linear_allow_neg_eigval") else 1.0
        sizes = entries.count(key_name), entries.count(value_name)
        return MixerParameters(
            entries.count(keys), heads, *sizes, beta_scale=scale, epsilon=entries.number("mixer_epsilon")
        )
    if not (heads := entries.count("mamba_n_heads mamba_num_heads", 0)):
        return None
    head_dim = entries.first("mamba_d_head mamba_head_dim")
    inner = entries.count("mamba_d_ssm", entries.count("mamba_expand", 2) * hidden)
    value_size = inner // heads if head_dim in (None, "auto") else int(head_dim)
    low, high = entries.get("time_step_limit") or (0.0, math.inf)
    high = math.inf if isinstance(high, dict) else high  # as transformers saves it
    norms = entries.get("mamba_rms_norm", True)
    return MixerParameters(
        entries.count("mamba_n_groups n_groups"),
        heads,
        entries.count("mamba_d_state ssm_state_size"),
        value_size,
        (entries.number("time_step_min", low), float(high)),
        bool(norms and entries.get("mamba_norm_before_gate")),
    )


def _sliding(kind: ModelType, entries: Entries, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer."""
    window, types = entries.get("sliding_window"), entries.get("layer_types")
    if not window or entries.get("use_sliding_window") is False:
        return (None,) * layers
    if kind.slides_everywhere:
        return (int(window),) * layers
    if types is None:
        every = entries.count("sliding_window_pattern", kind.architecture.full_every)
        if not every:
            raise DescriptionError(f"its sliding_window is {window}, in layers that it does not name")
        return tuple(None if (number + 1) % every == 0 else int(window) for number in range(layers))
    if len(types) != layers or not {*types} <= _KINDS:
        raise DescriptionError(f"its layers are {types}")
    return tuple(int(window) if name == "sliding_attention" else None for name in types)
