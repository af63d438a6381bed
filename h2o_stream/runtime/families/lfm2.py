"""LFM2 and LFM3: short convolutions beside attention."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from h2o_stream.native.abi import GateKind, Scoring
from h2o_stream.runtime.families.architecture import AFTER, BEFORE, Architecture, ModelType, mlp_names

_NAMES = {
    "token_embd_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "shortconv.conv": "conv.conv",
}
_LFM2 = Architecture(
    config=lambda *_: {"block_auto_adjust_ff_dim": False},
    final_norm="token_embd_norm",
    stored_as_in_gguf={"shortconv.conv"},
).with_names(_NAMES)

_LFM2_MOE = _LFM2.with_names(
    mlp_names("feed_forward.experts", "_exps")
    | {"ffn_gate_inp": "feed_forward.gate", "exp_probs_b": "feed_forward.expert_bias"},
    model_type="lfm2_moe",
    config=lambda *_: {},
    scoring=Scoring.SIGMOID,
    normalizes_experts=True,
    stored_as_in_gguf={"shortconv.conv", "exp_probs_b"},
)
_LFM3 = replace(_LFM2, norms=BEFORE | AFTER, optional_norms=set(AFTER), gate_kind=GateKind.SIGMOID_GATE).with_names(
    {f"attn_{name}_norm": f"self_attn.{name}_norm" for name in ("q", "k")}
    | {
        "attn_output": "self_attn.o_proj",
        "attn_output_gate": "self_attn.gate_proj",
        "post_attention_norm": "post_operator_norm",
        "post_ffw_norm": "post_ffn_norm",
    }
)


def _numbers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Under older names; MLPs have two thirds of what is said, times a factor, up to a multiple."""
    inner = int(config.get("block_ff_dim") or config["intermediate_size"])
    if config.get("block_auto_adjust_ff_dim"):
        inner, factor = int(2 * inner / 3), config.get("block_ffn_dim_multiplier")
        if factor is not None:
            multiple = config["block_multiple_of"]
            inner = -(-int(factor * inner) // multiple) * multiple
    return {"inner_size": inner, "tied": bool(config.get("tie_embedding", config["tie_word_embeddings"]))}


_EXPERTS = {f"ffn_{name}_exps": f"feed_forward.experts.w{n}" for name, n in {"gate": 1, "down": 2, "up": 3}.items()}

ARCHITECTURES = {"lfm2": _LFM2, "lfm2moe": _LFM2_MOE}
MODEL_TYPES = {
    "lfm2": ModelType(_LFM2, numbers=_numbers),
    "lfm2_moe": ModelType(_LFM2_MOE.with_names(_EXPERTS), numbers=_numbers),
    "lfm3": ModelType(_LFM3, numbers=lambda config: {"gate_size": 1}),
}
