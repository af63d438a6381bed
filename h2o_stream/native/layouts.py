"""Module names of transformers' decoder layers.

A layer matches a layout if it has exactly these modules, ignoring dropout: an unknown module would not be computed.
What a norm or an activation computes is determined by evaluating it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from h2o_stream.native.abi import Activation, GateKind

FINAL_NORMS = ("norm", "final_layer_norm", "final_layernorm", "embedding_norm", "norm_f")
"""Names of the final norm."""

WITHIN = ("model", "decoder", "language_model")
"""Where the module that holds the layers may be, beside the base model, one in another."""

ROTARY = ("rotary_emb", "pos_emb")
"""Names of the rotary embedding."""

NORMED_EMBEDDINGS = ("NanoChatModel",)
"""Models that apply the final norm before the first layer, too."""


NORM_ROLES = ("before_attention", "after_attention", "before_mlp", "after_mlp")
"""The norms of a layer."""


@dataclass(frozen=True)
class LayerLayout:
    """Module names in a decoder layer.

    Attributes:
        mlp: the MLP, or None if there is none, or if its linear layers belong to the decoder layer itself.
        norms: module name of each norm in `NORM_ROLES`.
        parallel: whether the MLP reads the attention's input; None if an attribute of the layer tells.
        mixer: the recurrent mixer, beside attention or in its place, or None.
        shared: an expert that all tokens go through, beside those in `mlp`.
        owns_mlp: whether the linear layers of the MLP belong to the decoder layer itself.
    """

    attention: str | None
    mlp: str | None
    norms: Mapping[str, str]
    parallel: bool | None = None
    mixer: str | None = None
    shared: str | None = None
    owns_mlp: bool = False

    @property
    def names(self) -> set[str]:
        """All modules."""
        return {*self.norms.values(), *filter(None, (self.attention, self.mixer, self.mlp, self.shared))}


def _layer(attention: str | None, mlp: str | None, norms: str, **further: Any) -> LayerLayout:
    """A layout with the names of the norms in `NORM_ROLES`, in this order; a dash where there is none."""
    named = zip(NORM_ROLES, norms.split(), strict=False)
    return LayerLayout(attention, mlp, {role: name for role, name in named if name != "-"}, **further)


_TWO_NORMS = "input_layernorm - post_attention_layernorm"
_LFM2_NORMS, _LFM3_NORMS = "operator_norm - ffn_norm", "operator_norm post_operator_norm ffn_norm post_ffn_norm"
_BEFORE_FEED_FORWARD = "input_layernorm - pre_ff_layernorm"

LAYERS = (
    _layer("self_attn", "mlp", _TWO_NORMS),
    _layer("self_attn", "block_sparse_moe", _TWO_NORMS),
    _layer("self_attn", "block_sparse_moe", _TWO_NORMS, shared="shared_mlp"),
    _layer("self_attn", "feed_forward", _TWO_NORMS),
    _layer("attn", "mlp", "attn_norm - mlp_norm"),
    _layer("self_attn", "mlp", "input_layernorm post_attention_layernorm pre_mlp_layernorm post_mlp_layernorm"),
    _layer(None, "block_sparse_moe", _TWO_NORMS, mixer="mamba", shared="shared_mlp"),
    _layer("self_attn", "shared_mlp", _TWO_NORMS),
    _layer(None, "shared_mlp", _TWO_NORMS, mixer="mamba"),
    _layer(
        "self_attn",
        "mlp",
        "input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm",
    ),
    _layer("self_attn", "mlp", "- post_attention_layernorm - post_feedforward_layernorm"),
    _layer("self_attn", "mlp", "input_layernorm - pre_feedforward_layernorm"),
    _layer("attention", "mlp", _TWO_NORMS),
    _layer("self_attn", "mlp", "input_layernorm - input_layernorm", parallel=True),
    _layer("self_attn", None, "self_attn_layer_norm - final_layer_norm", owns_mlp=True),
    _layer("self_attn", "mlp", "input_layernorm post_self_attn_layernorm post_attention_layernorm post_mlp_layernorm"),
    _layer("self_attn", "mlp", "input_layernorm post_norm1 post_attention_layernorm post_norm2"),
    _layer("self_attn", "mlp", "attention_layernorm - feedforward_layernorm"),
    _layer("self_attn", "feed_forward", _LFM2_NORMS),
    _layer(None, "feed_forward", _LFM2_NORMS, mixer="conv"),
    _layer("self_attn", "feed_forward", _LFM3_NORMS),
    _layer(None, "feed_forward", _LFM3_NORMS, mixer="conv"),
    _layer(None, "mlp", _TWO_NORMS, mixer="linear_attn"),
    _layer("self_attn", "feed_forward", _BEFORE_FEED_FORWARD),
    _layer(None, "feed_forward", _BEFORE_FEED_FORWARD, mixer="mamba"),
    _layer("self_attn", "feed_forward", _BEFORE_FEED_FORWARD, mixer="mamba"),
    _layer("mixer", None, "norm"),
    _layer(None, None, "norm", mixer="mixer"),
    _layer(None, "mixer", "- - norm"),
)
"""Llama and most others; Granite MoE; Granite MoE with a shared expert, Llama 4, ModernBERT, AFMoE, Granite 4; Gemma 2
and 3; EXAONE 4, OLMo 2; VaultGemma; GPT-NeoX; Phi, Cohere, StableLM 2 12B; OPT; GLM-4 0414; HyperCLOVA X; Apertus;
LFM2; LFM3; Qwen 3.5; Bamba; Falcon-H1; Nemotron-H, whose mixer may be anything."""


@dataclass(frozen=True)
class AttentionLayout:
    """Module names in an attention.

    Attributes:
        qkv: the projections to queries, keys and values, in this order.
        order: whether a fused projection concatenates the three or interleaves them per head.
        norms_after_rope: whether they come after RoPE.
    """

    qkv: tuple[str, ...]
    out: str
    order: Literal["concatenated", "interleaved"] = "concatenated"
    norms: tuple[str, str] = ("q_norm", "k_norm")
    norms_after_rope: bool = False

    def needed(self, module: Any) -> tuple[str, ...]:
        """The projections that an attention must have: none for keys of another layer, or for values that are keys."""
        if getattr(module, BORROWS, False):
            return self.qkv[:1]
        return self.qkv[:2] if getattr(module, self.qkv[-1], self) is None else self.qkv


_QKV = ("q_proj", "k_proj", "v_proj")

ATTENTIONS = (
    AttentionLayout(_QKV, "o_proj"),
    AttentionLayout(_QKV, "o_proj", norms=("query_layernorm", "key_layernorm"), norms_after_rope=True),
    AttentionLayout(_QKV, "o_proj", norms=("qk_norm", "qk_norm"), norms_after_rope=True),
    AttentionLayout(_QKV, "Wo"),
    AttentionLayout(_QKV, "out_proj"),
    AttentionLayout(_QKV, "out_proj", norms=("q_layernorm", "k_layernorm")),
    AttentionLayout(_QKV, "dense", norms=("q_layernorm", "k_layernorm")),
    AttentionLayout(("qkv_proj",), "o_proj"),
    AttentionLayout(("query_key_value",), "dense", order="interleaved", norms=("q_layernorm", "k_layernorm")),
)
"""Llama and most others; HunYuan; Llama 4; ModernBERT; OPT; LFM2; Phi; Phi-3; GPT-NeoX, Persimmon. Of those that match,
one with norms."""


LATENT = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
"""Modules of an attention with latent keys and values: the projection to the latent vector and the end of all keys, the
norm of that vector, the projection from it to keys and values, and the output projection."""

GATES = {"gate_proj": GateKind.SIGMOID_GATE, "g_proj": GateKind.SOFTPLUS_GATE}
"""Projections to factors on the output of an attention, before its output projection; and what they go through."""

_SIGMOID_GATES = ("Lfm3Attention",)
"""Attention classes whose gates go through another function than their names say."""


def gate_kind(attention: Any, key: str) -> GateKind:
    """What the gate of an attention, the output of its projection `key`, goes through."""
    return GateKind.SIGMOID_GATE if type(attention).__name__ in _SIGMOID_GATES else GATES[key]


VALUE_NORM, OUTPUT_NORM = "v_norm", "attn_sub_norm"
"""Norms of each head's value, and of the output before the output projection."""

BORROWS = "is_kv_shared_layer"
"""Attribute of an attention: whether it uses the keys and values of an earlier layer of its kind, the last one with its
own."""


OWN_EMBEDDING = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
"""Modules of a layer that adds something for the token's embedding for it: gate, projection and norm."""

OWN_EMBEDDING_SCALES = ("per_layer_model_projection_scale", "per_layer_projection_scale")
OWN_EMBEDDING_OUTPUT_SCALE = "per_layer_input_scale"
"""Buffers of a model with such layers: factors on its projection, by any of these names, and on all of them."""

ALTUP, LAUREL = "altup", "laurel"
"""Modules of a layer with several versions of the residual stream, and with a residual of low rank (Gemma 3n)."""

GATE_SPARSITY = "activation_sparsity"
"""Attribute of an MLP: the share of gates, if they were normally distributed, that do not go on; 0 for none."""

OUTPUT_SCALE = "layer_scalar"
"""Buffer of a layer: a factor on what it gives."""


@dataclass(frozen=True)
class MlpLayout:
    """Module names in an MLP; with `fused`, `up` holds the gate's rows, then its own.

    `activation` is set where no module has it.
    """

    gate: str | None
    up: str
    down: str
    fused: bool = False
    activation: Activation | None = None


MLPS = (
    MlpLayout("gate_proj", "up_proj", "down_proj"),
    MlpLayout(None, "gate_up_proj", "down_proj", fused=True),
    MlpLayout(None, "dense_h_to_4h", "dense_4h_to_h"),
    MlpLayout(None, "input_linear", "output_linear", fused=True),
    MlpLayout(None, "Wi", "Wo", fused=True),
    MlpLayout(None, "fc1", "fc2"),
    MlpLayout(None, "c_fc", "c_proj"),
    MlpLayout(None, "up_proj", "down_proj"),
    MlpLayout("w1", "w3", "w2", activation=Activation.SILU),
)
"""Llama and most others; Phi-3; GPT-NeoX; Granite's shared expert; ModernBERT; OPT, Phi; StarCoder 2; Nemotron;
LFM2."""


BESIDE = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2", "post_feedforward_layernorm_1")
"""Norms of a layer whose experts are beside its MLP (Gemma 4): of their inputs, their outputs, and those of the MLP."""

BESIDE_MODULES = {"router", "experts", *BESIDE}

INNER_NORM = "ffn_sub_norm"
"""Norm of what goes into the last matrix of an MLP."""

AFTER_EXPERTS = "post_mlp_layernorm"
"""Norm of the output, in a block of experts."""

ACTIVATIONS = ("act_fn", "activation_fn", "act", "activation")

NEUTRAL_FLAGS: Mapping[str, tuple[object, ...]] = {
    "do_layer_norm_before": (True,),
    "use_bidirectional_attention": (None, False, "vision"),
    "is_causal": (True,),
    "alibi": (None, False),
    "moe_router_logit_softcapping": (None, 0),
}
"""Supported values of attributes of configs, RoPE parameters, layers and attentions that change the computation."""

SINKS = "sinks"
"""Parameter of an attention with learned sinks."""

_ROTATES: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("Exaone4Attention", "ExaoneMoeAttention", "Kolibri1Attention"),
        lambda attention: attention.sliding_window is None or attention.is_sliding,
    ),
    **dict.fromkeys(
        ("Cohere2Attention", "FlintAttention", "AfmoeAttention"),
        lambda attention: attention.sliding_window is not None,
    ),
    "Cohere2MoeAttention": lambda attention: attention.sliding_window is not None or attention.force_rope,
}
"""Attention classes that apply RoPE in some layers, and in which."""


def rotates(attention: Any) -> bool:
    """Whether an attention applies RoPE, in a model with a rotary embedding."""
    rotates = _ROTATES.get(type(attention).__name__)
    return rotates(attention) if rotates else bool(getattr(attention, "use_rope", True))
