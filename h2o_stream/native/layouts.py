"""Module names of transformers' decoder layers.

A layer matches a layout if it has exactly these modules, ignoring dropout: an unknown module would not be computed.
What a norm or an activation computes is determined by evaluating it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FINAL_NORMS = ("norm", "final_layer_norm", "final_layernorm")
"""Names of the final norm."""


NORM_ROLES = ("before_attention", "after_attention", "before_mlp", "after_mlp")
"""The norms of a layer."""


@dataclass(frozen=True)
class LayerLayout:
    """Module names in a decoder layer.

    Attributes:
        attention: the attention module.
        mlp: the MLP, or None if its linear layers belong to the decoder layer itself.
        norms: module name of each norm in `NORM_ROLES`.
        parallel: whether the MLP reads the attention's input; None if an attribute of the layer tells.
    """

    attention: str
    mlp: str | None
    norms: Mapping[str, str]
    parallel: bool | None = None


_TWO_NORMS = {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}

LAYERS = (
    LayerLayout("self_attn", "mlp", _TWO_NORMS),
    LayerLayout("self_attn", "block_sparse_moe", _TWO_NORMS),
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
    LayerLayout("self_attn", None, {"before_attention": "self_attn_layer_norm", "before_mlp": "final_layer_norm"}),
)
"""Llama and most others; Granite MoE; Gemma 2 and 3; EXAONE 4, OLMo 2; VaultGemma; GPT-NeoX; Phi, StableLM 2 12B;
OPT."""


@dataclass(frozen=True)
class AttentionLayout:
    """Module names in an attention.

    Attributes:
        qkv: the projections to queries, keys and values, in this order.
        out: the output projection.
        order: whether a fused projection concatenates the three or interleaves them per head.
        norms: optional norms of queries and keys.
    """

    qkv: tuple[str, ...]
    out: str
    order: Literal["concatenated", "interleaved"] = "concatenated"
    norms: tuple[str, str] = ("q_norm", "k_norm")


_QKV = ("q_proj", "k_proj", "v_proj")

ATTENTIONS = (
    AttentionLayout(_QKV, "o_proj"),
    AttentionLayout(_QKV, "out_proj"),
    AttentionLayout(_QKV, "dense", norms=("q_layernorm", "k_layernorm")),
    AttentionLayout(("qkv_proj",), "o_proj"),
    AttentionLayout(("query_key_value",), "dense", order="interleaved"),
)
"""Llama and most others; OPT; Phi; Phi-3; GPT-NeoX."""


@dataclass(frozen=True)
class MlpLayout:
    """Module names in an MLP; with `fused`, `up` holds the gate's rows, then its own."""

    gate: str | None
    up: str
    down: str
    fused: bool = False


MLPS = (
    MlpLayout("gate_proj", "up_proj", "down_proj"),
    MlpLayout(None, "gate_up_proj", "down_proj", fused=True),
    MlpLayout(None, "dense_h_to_4h", "dense_4h_to_h"),
    MlpLayout(None, "fc1", "fc2"),
    MlpLayout(None, "c_fc", "c_proj"),
    MlpLayout(None, "up_proj", "down_proj"),
)
"""Llama and most others; Phi-3; GPT-NeoX; OPT, Phi; StarCoder 2; Nemotron."""

ACTIVATIONS = ("act_fn", "activation_fn", "act")

NEUTRAL_FLAGS: Mapping[str, tuple[object, ...]] = {
    "do_layer_norm_before": (True,),
    "use_bidirectional_attention": (None, False),
    "is_causal": (True,),
    "clip_qkv": (None,),
    "alibi": (None, False),
    "attn_temperature_tuning": (None, False, 0),
    "use_rope": (True, 1),
    "llama_4_scaling_beta": (None, 0),
}
"""Supported values of attributes of configs, RoPE parameters, layers and attentions that change the computation."""

NO_ROPE_IN_FULL_LAYERS = ("Exaone4Attention",)
"""Attention classes that apply RoPE in sliding-window layers only, if a model has both kinds."""
