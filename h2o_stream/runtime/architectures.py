"""The families that are described from files: what their tensors are called, and what their names do not say.

Biases, norms of queries and keys and norms after a block are there if the file has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from h2o_stream.native.abi import Activation

EMBEDDING, OUTPUT, FINAL_NORM = "token_embd", "output", "output_norm"
"""llama.cpp's names of what is outside of layers, without ``.weight``."""

_LAYER = "model.layers.{layer}."

_CHECKPOINT_NAMES = {
    EMBEDDING: "model.embed_tokens",
    OUTPUT: "lm_head",
    FINAL_NORM: "model.norm",
    "attn_norm": f"{_LAYER}input_layernorm",
    "attn_q": f"{_LAYER}self_attn.q_proj",
    "attn_k": f"{_LAYER}self_attn.k_proj",
    "attn_v": f"{_LAYER}self_attn.v_proj",
    "attn_q_norm": f"{_LAYER}self_attn.q_norm",
    "attn_k_norm": f"{_LAYER}self_attn.k_norm",
    "attn_output": f"{_LAYER}self_attn.o_proj",
    "ffn_norm": f"{_LAYER}post_attention_layernorm",
    "ffn_gate": f"{_LAYER}mlp.gate_proj",
    "ffn_up": f"{_LAYER}mlp.up_proj",
    "ffn_down": f"{_LAYER}mlp.down_proj",
    "ffn_gate_inp": f"{_LAYER}mlp.gate",
    "ffn_gate_exps": f"{_LAYER}mlp.experts.gate_proj",
    "ffn_up_exps": f"{_LAYER}mlp.experts.up_proj",
    "ffn_down_exps": f"{_LAYER}mlp.experts.down_proj",
    "ffn_gate_inp_shexp": f"{_LAYER}mlp.shared_expert_gate",
    "ffn_gate_shexp": f"{_LAYER}mlp.shared_expert.gate_proj",
    "ffn_up_shexp": f"{_LAYER}mlp.shared_expert.up_proj",
    "ffn_down_shexp": f"{_LAYER}mlp.shared_expert.down_proj",
}
"""transformers' names by those of llama.cpp."""

_SANDWICH = {
    "post_attention_norm": f"{_LAYER}post_attention_layernorm",
    "ffn_norm": f"{_LAYER}pre_feedforward_layernorm",
    "post_ffw_norm": f"{_LAYER}post_feedforward_layernorm",
}
"""The same where every block has a norm before and after it."""


_FUSED = {"attn_qkv": f"{_LAYER}self_attn.qkv_proj", "ffn_up": f"{_LAYER}mlp.gate_up_proj"}
"""Where queries, keys and values are one matrix, and so are gate and up."""

_UNGATED = {"ffn_up": f"{_LAYER}mlp.c_fc", "ffn_down": f"{_LAYER}mlp.c_proj"}
"""Where there is no gate."""


@dataclass(frozen=True)
class Architecture:
    """What a family's names and parameters do not say.

    Attributes:
        interleaved: in GGUF files the rows of queries and keys are in the order of RoPE by adjacent pairs.
        activation: of the MLP.
        fused_mlp: ``ffn_up`` has the gate's rows, then its own.
        scales_embeddings: by the root of the hidden size.
        norm_offset: added to the weights of norms in transformers' checkpoints; GGUF files have them added.
        full_every: every so many layers one sees everything, and the others have the sliding window; 0 for all alike.
        local_theta: base of RoPE in layers with a sliding window, where it is another one, if the file does not say.
        normalizes_experts: the weights of a token's experts are divided by their sum, unless the file says otherwise.
        large: number of layers of a model that scales queries by its hidden size and not by its heads'; 0 for none.
        checkpoint_names: of transformers, by llama.cpp's.
    """

    interleaved: bool = False
    activation: Activation = Activation.SILU
    fused_mlp: bool = False
    scales_embeddings: bool = False
    norm_offset: float = 0.0
    full_every: int = 0
    local_theta: float = 0.0
    normalizes_experts: bool = False
    large: int = 0
    checkpoint_names: Mapping[str, str] = field(default_factory=lambda: _CHECKPOINT_NAMES)


_GEMMA = Architecture(
    activation=Activation.GELU_TANH,
    scales_embeddings=True,
    norm_offset=1.0,
    checkpoint_names=_CHECKPOINT_NAMES | _SANDWICH,
)

ARCHITECTURES = {
    "llama": Architecture(interleaved=True, normalizes_experts=True),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "qwen2moe": Architecture(),
    "qwen3moe": Architecture(normalizes_experts=True),
    "gemma2": replace(_GEMMA, full_every=2, large=46),
    "gemma3": replace(_GEMMA, full_every=6, local_theta=10_000.0, large=62),
    "phi3": Architecture(fused_mlp=True, checkpoint_names=_CHECKPOINT_NAMES | _FUSED),
    "starcoder2": Architecture(activation=Activation.GELU_TANH, checkpoint_names=_CHECKPOINT_NAMES | _UNGATED),
}
"""By llama.cpp's name."""
