"""LFM2: short convolutions beside attention."""

from h2o_stream.native.abi import Scoring
from h2o_stream.runtime.families.architecture import Architecture, mlp_names

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

ARCHITECTURES = {
    "lfm2": _LFM2,
    "lfm2moe": _LFM2.with_names(
        mlp_names("feed_forward.experts", "_exps")
        | {"ffn_gate_inp": "feed_forward.gate", "exp_probs_b": "feed_forward.expert_bias"},
        model_type="lfm2_moe",
        config=lambda *_: {},
        scoring=Scoring.SIGMOID,
        normalizes_experts=True,
        stored_as_in_gguf={"shortconv.conv", "exp_probs_b"},
    ),
}
