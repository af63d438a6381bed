"""Module names of transformers' decoder layers.

A layer matches a layout if it has exactly these modules, ignoring dropout: an unknown module would not be computed.
What a norm or an activation computes is determined by evaluating it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from h2o_stream.native.abi import Activation

FINAL_NORMS = ("norm", "final_layer_norm", "final_layernorm", "embedding_norm", "norm_f")
"""Names of the final norm."""

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
        attention: the attention module, or None.
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


_LFM2_NORMS = {"before_attention": "operator_norm", "before_mlp": "ffn_norm"}
_BEFORE_FEED_FORWARD = {"before_attention": "input_layernorm", "before_mlp": "pre_ff_layernorm"}
_TWO_NORMS = {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}

LAYERS = (
    LayerLayout("self_attn", "mlp", _TWO_NORMS),
    LayerLayout("self_attn", "block_sparse_moe", _TWO_NORMS),
    LayerLayout("self_attn", "block_sparse_moe", _TWO_NORMS, shared="shared_mlp"),
    LayerLayout(None, "block_sparse_moe", _TWO_NORMS, mixer="mamba", shared="shared_mlp"),
    LayerLayout("self_attn", "shared_mlp", _TWO_NORMS),
    LayerLayout(None, "shared_mlp", _TWO_NORMS, mixer="mamba"),
    LayerLayout(
        "self_attn",
        "mlp",
        {
            "before_attention": "input_layernorm",
            "after_attention": "post_attention_layernorm",
            "before_mlp": "pre_feedforward_layernorm",
            "after_mlp": "post_feedforward_layernorm",
        },
    ),
    LayerLayout(
        "self_attn", "mlp", {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}
    ),
    LayerLayout("self_attn", "mlp", {"before_attention": "input_layernorm", "before_mlp": "pre_feedforward_layernorm"}),
    LayerLayout("attention", "mlp", _TWO_NORMS),
    LayerLayout(
        "self_attn", "mlp", {"before_attention": "input_layernorm", "before_mlp": "input_layernorm"}, parallel=True
    ),
    LayerLayout(
        "self_attn",
        None,
        {"before_attention": "self_attn_layer_norm", "before_mlp": "final_layer_norm"},
        owns_mlp=True,
    ),
    LayerLayout(
        "self_attn",
        "mlp",
        {**_TWO_NORMS, "after_attention": "post_self_attn_layernorm", "after_mlp": "post_mlp_layernorm"},
    ),
    LayerLayout("self_attn", "mlp", {**_TWO_NORMS, "after_attention": "post_norm1", "after_mlp": "post_norm2"}),
    LayerLayout("self_attn", "mlp", {"before_attention": "attention_layernorm", "before_mlp": "feedforward_layernorm"}),
    LayerLayout("self_attn", "feed_forward", _LFM2_NORMS),
    LayerLayout(None, "feed_forward", _LFM2_NORMS, mixer="conv"),
    LayerLayout(None, "mlp", _TWO_NORMS, mixer="linear_attn"),
    LayerLayout("self_attn", "feed_forward", _BEFORE_FEED_FORWARD),
    LayerLayout(None, "feed_forward", _BEFORE_FEED_FORWARD, mixer="mamba"),
    LayerLayout("self_attn", "feed_forward", _BEFORE_FEED_FORWARD, mixer="mamba"),
    LayerLayout("mixer", None, {"before_attention": "norm"}),
    LayerLayout(None, None, {"before_attention": "norm"}, mixer="mixer"),
    LayerLayout(None, "mixer", {"before_mlp": "norm"}),
)
"""Llama and most others; Granite MoE; Granite MoE with a shared expert, Granite 4; Gemma 2 and 3; EXAONE 4, OLMo 2;
VaultGemma; GPT-NeoX; Phi, Cohere, StableLM 2 12B; OPT; GLM-4 0414; HyperCLOVA X; Apertus; LFM2; Qwen 3.5; Bamba;
Falcon-H1; Nemotron-H, whose mixer may be anything."""


@dataclass(frozen=True)
class AttentionLayout:
    """Module names in an attention.

    Attributes:
        qkv: the projections to queries, keys and values, in this order.
        out: the output projection.
        order: whether a fused projection concatenates the three or interleaves them per head.
        norms: optional norms of queries and keys.
        norms_after_rope: whether they come after RoPE.
    """

    qkv: tuple[str, ...]
    out: str
    order: Literal["concatenated", "interleaved"] = "concatenated"
    norms: tuple[str, str] = ("q_norm", "k_norm")
    norms_after_rope: bool = False


_QKV = ("q_proj", "k_proj", "v_proj")

ATTENTIONS = (
    AttentionLayout(_QKV, "o_proj"),
    AttentionLayout(_QKV, "o_proj", norms=("query_layernorm", "key_layernorm"), norms_after_rope=True),
    AttentionLayout(_QKV, "out_proj"),
    AttentionLayout(_QKV, "out_proj", norms=("q_layernorm", "k_layernorm")),
    AttentionLayout(_QKV, "dense", norms=("q_layernorm", "k_layernorm")),
    AttentionLayout(("qkv_proj",), "o_proj"),
    AttentionLayout(("query_key_value",), "dense", order="interleaved", norms=("q_layernorm", "k_layernorm")),
)
"""Llama and most others; HunYuan; OPT; LFM2; Phi; Phi-3; GPT-NeoX, Persimmon. Of those that match, one with norms."""


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
    MlpLayout(None, "fc1", "fc2"),
    MlpLayout(None, "c_fc", "c_proj"),
    MlpLayout(None, "up_proj", "down_proj"),
    MlpLayout("w1", "w3", "w2", activation=Activation.SILU),
)
"""Llama and most others; Phi-3; GPT-NeoX; Granite's shared expert; OPT, Phi; StarCoder 2; Nemotron; LFM2."""

ACTIVATIONS = ("act_fn", "activation_fn", "act", "activation")

NEUTRAL_FLAGS: Mapping[str, tuple[object, ...]] = {
    "do_layer_norm_before": (True,),
    "use_bidirectional_attention": (None, False),
    "is_causal": (True,),
    "clip_qkv": (None,),
    "alibi": (None, False),
    "attn_temperature_tuning": (None, False, 0),
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
    known = _ROTATES.get(type(attention).__name__)
    return known(attention) if known else bool(getattr(attention, "use_rope", True))
