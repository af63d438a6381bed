"""The families that are described from files: what their tensors are called, and what their names do not say.

Biases, and norms of queries and keys, are there if the file has them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from h2o_stream.native.abi import MAX_VERSIONS, Activation, Scoring

EMBEDDING, OUTPUT, FINAL_NORM = "token_embd", "output", "output_norm"
LAYER_EMBEDDINGS = "per_layer_token_embd"
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
"""The same where every block has a norm before and after it, or after it only."""

_GLM = {
    "post_attention_norm": f"{_LAYER}post_self_attn_layernorm",
    "post_ffw_norm": f"{_LAYER}post_mlp_layernorm",
    "ffn_up": f"{_LAYER}mlp.gate_up_proj",
}
"""The same in GLM-4."""

_LATE = {"post_attention_norm": f"{_LAYER}post_attention_layernorm"}
"""Where the norm before the MLP is called one after the attention."""

_FUSED = {"attn_qkv": f"{_LAYER}self_attn.qkv_proj", "ffn_up": f"{_LAYER}mlp.gate_up_proj"}
"""Where queries, keys and values are one matrix, and so are gate and up."""

_UNGATED = {"ffn_up": f"{_LAYER}mlp.c_fc", "ffn_down": f"{_LAYER}mlp.c_proj"}
"""Where there is no gate."""

_HUNYUAN = {"attn_q_norm": f"{_LAYER}self_attn.query_layernorm", "attn_k_norm": f"{_LAYER}self_attn.key_layernorm"}

_HUNYUAN_EXPERTS = {f"ffn_{name}_shexp": f"{_LAYER}mlp.shared_mlp.{name}_proj" for name in ("gate", "up", "down")} | {
    "ffn_gate_inp": f"{_LAYER}mlp.gate.wg"
}

_SHARED_EXPERTS = {
    f"ffn_{name}_shexp": f"{_LAYER}mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")
} | {"exp_probs_b": f"{_LAYER}mlp.gate.e_score_correction_bias"}
"""Of models whose experts for all tokens are several, as one."""

_ERNIE_EXPERTS = {"exp_probs_b": f"{_LAYER}mlp.gate.moe_statics.e_score_correction_bias"}

_LATENT = {
    "attn_q_a": f"{_LAYER}self_attn.q_a_proj",
    "attn_q_a_norm": f"{_LAYER}self_attn.q_a_layernorm",
    "attn_q_b": f"{_LAYER}self_attn.q_b_proj",
    "attn_kv_a_mqa": f"{_LAYER}self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": f"{_LAYER}self_attn.kv_a_layernorm",
    **dict.fromkeys(("attn_kv_b", "attn_k_b", "attn_v_b"), f"{_LAYER}self_attn.kv_b_proj"),
}
"""Of latent keys and values; files may have the last one in two parts."""

_GRANITE_EXPERTS = {
    f"ffn_{name}_exps": f"{_LAYER}block_sparse_moe.experts.{name}_proj" for name in ("gate", "up", "down")
} | {"ffn_gate_inp": f"{_LAYER}block_sparse_moe.router"}

_LFM2_NAMES = {
    "token_embd_norm": "model.embedding_norm",
    "attn_norm": f"{_LAYER}operator_norm",
    "attn_q_norm": f"{_LAYER}self_attn.q_layernorm",
    "attn_k_norm": f"{_LAYER}self_attn.k_layernorm",
    "attn_output": f"{_LAYER}self_attn.out_proj",
    "ffn_norm": f"{_LAYER}ffn_norm",
    "ffn_gate": f"{_LAYER}feed_forward.w1",
    "ffn_down": f"{_LAYER}feed_forward.w2",
    "ffn_up": f"{_LAYER}feed_forward.w3",
    "shortconv.in_proj": f"{_LAYER}conv.in_proj",
    "shortconv.out_proj": f"{_LAYER}conv.out_proj",
    "shortconv.conv": f"{_LAYER}conv.conv",
}

_LFM2_EXPERTS = {f"ffn_{name}_exps": f"{_LAYER}feed_forward.experts.{name}_proj" for name in ("gate", "up", "down")} | {
    "ffn_gate_inp": f"{_LAYER}feed_forward.gate",
    "exp_probs_b": f"{_LAYER}feed_forward.expert_bias",
}

_GPT_OSS = {"attn_sinks": f"{_LAYER}self_attn.sinks", "ffn_gate_inp": f"{_LAYER}mlp.router"}

_MIXER_PARTS = {
    "ssm_conv1d": "conv1d",
    "ssm_dt": "dt_bias",
    "ssm_a": "A_log",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
"""Of recurrent mixers with heads."""


def _state_space(module: str) -> dict[str, str]:
    """Names of a Mamba-2."""
    return {
        name: f"{_LAYER}{module}.{part}" for name, part in (_MIXER_PARTS | {"ssm_in": "in_proj", "ssm_d": "D"}).items()
    }


_GRANITE_HYBRID = _state_space("mamba") | {
    f"ffn_{name}{kind}": f"{_LAYER}shared_mlp.{part}_linear"
    for name, part in {"gate": "input", "up": "input", "down": "output"}.items()
    for kind in ("", "_shexp")
}

_FALCON_H1 = (
    _state_space("mamba")
    | {f"ffn_{name}": f"{_LAYER}feed_forward.{name}_proj" for name in ("gate", "up", "down")}
    | {"ffn_norm": f"{_LAYER}pre_ff_layernorm", FINAL_NORM: "model.final_layernorm"}
)

_NEMOTRON_H_NAMES = (
    _state_space("mixer")
    | {f"attn_{name}": f"{_LAYER}mixer.{name}_proj" for name in ("q", "k", "v")}
    | {
        f"ffn_{name}{kind}": f"{_LAYER}mixer.{module}{name}_proj"
        for name in ("up", "down")
        for kind, module in {"": "", "_exps": "experts.", "_shexp": "shared_experts."}.items()
    }
    | {
        EMBEDDING: "model.embeddings",
        FINAL_NORM: "model.norm_f",
        "attn_norm": f"{_LAYER}norm",
        "attn_output": f"{_LAYER}mixer.o_proj",
        "ffn_gate_inp": f"{_LAYER}mixer.gate",
        "exp_probs_b": f"{_LAYER}mixer.gate.e_score_correction_bias",
    }
)

_DELTA = {name: f"{_LAYER}linear_attn.{part}" for name, part in _MIXER_PARTS.items()}
_QWEN_3_5 = _DELTA | {
    name: f"{_LAYER}linear_attn.in_proj_{part}"
    for name, part in {"attn_qkv": "qkv", "attn_gate": "z", "ssm_beta": "b", "ssm_alpha": "a"}.items()
}
_QWEN_3_NEXT = _DELTA | {
    name: f"{_LAYER}linear_attn.in_proj_{part}"
    for name, part in {"attn_qkv": "qkvz", "attn_gate": "qkvz", "ssm_ba": "ba"}.items()
}
"""Of gated delta rules."""

_PARAMETERS = (
    "_bias",
    ".A_log",
    ".D",
    ".sinks",
    ".layer_scalar",
    ".correct_output_scale",
    ".scale",
    ".per_expert_scale",
)
"""Ends of names that are of parameters, not of modules."""

_OWN_EMBEDDINGS = {
    LAYER_EMBEDDINGS: "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": f"{_LAYER}per_layer_input_gate",
    "proj": f"{_LAYER}per_layer_projection",
    "post_norm": f"{_LAYER}post_per_layer_input_norm",
    "layer_output_scale": f"{_LAYER}layer_scalar",
}
"""Of embeddings of tokens in each layer, and of factors on what layers give."""

_BESIDE = {
    "ffn_gate_inp": f"{_LAYER}router.proj",
    "ffn_gate_inp.scale": f"{_LAYER}router.scale",
    "ffn_down_exps.scale": f"{_LAYER}router.per_expert_scale",
    "ffn_gate_up_exps": f"{_LAYER}experts.gate_up_proj",
    "ffn_down_exps": f"{_LAYER}experts.down_proj",
    "pre_ffw_norm_2": f"{_LAYER}pre_feedforward_layernorm_2",
    "post_ffw_norm_1": f"{_LAYER}post_feedforward_layernorm_1",
    "post_ffw_norm_2": f"{_LAYER}post_feedforward_layernorm_2",
}
"""Of experts beside an MLP (Gemma 4)."""

_ALTUP = {
    **{f"altup_proj.{number}": f"model.altup_projections.{number}" for number in range(MAX_VERSIONS - 1)},
    **{
        f"altup_unembd_proj.{number}": f"model.altup_unembed_projections.{number}" for number in range(MAX_VERSIONS - 1)
    },
    "altup_router": f"{_LAYER}altup.modality_router",
    "altup_router_norm": f"{_LAYER}altup.router_norm",
    "altup_predict_coef": f"{_LAYER}altup.prediction_coefs",
    "altup_correct_coef": f"{_LAYER}altup.correction_coefs",
    "altup_correct_scale": f"{_LAYER}altup.correct_output_scale",
    "laurel_l": f"{_LAYER}laurel.linear_left",
    "laurel_r": f"{_LAYER}laurel.linear_right",
    "laurel_post_norm": f"{_LAYER}laurel.post_laurel_norm",
}
"""Of versions of the residual stream, and of residuals of low rank."""

BEFORE = {"before_attention": "attn_norm", "before_mlp": "ffn_norm"}
_AFTER = {"after_attention": "post_attention_norm", "after_mlp": "post_ffw_norm"}
"""llama.cpp's names of a layer's norms, by role."""


@dataclass(frozen=True)
class Architecture:
    """What a family's names and parameters do not say.

    Attributes:
        interleaved: in GGUF files the rows of queries and keys are in the order of RoPE by adjacent pairs.
        adjacent: RoPE rotates adjacent pairs, in files as in transformers' models.
        final_norm: llama.cpp's name of the norm before the output layer.
        norms: llama.cpp's names of a layer's norms, by role; the layer has these and no others.
        norms_after_rope: norms of queries and keys come after RoPE.
        parallel: the MLP reads the attention's input.
        activation: of the MLP.
        activation_parameters: of it, see `abi.h`.
        fused_mlp: ``ffn_up`` has the gate's rows, then its own.
        scales_embeddings: by the root of the hidden size.
        divides_logits: the file's factor on logits is a divisor.
        norm_offset: added to the weights of norms in transformers' checkpoints; GGUF files have them added.
        full_every: every so many layers one sees everything, and the others have the sliding window; 0 for all alike.
        local_theta: base of RoPE in layers with a sliding window, where it is another one, if the file does not say.
        whole_ramp: YaRN mixes frequencies between whole numbers of dimensions.
        local_plain: RoPE in layers with a sliding window is not scaled.
        unrotated_every: every so many layers one has no positions; 0 for none.
        rotates_sliding: where some layers slide, the others have no positions.
        scoring: how a router's logits become scores, if the file does not say.
        normalizes_experts: the weights of a token's experts are divided by their sum, unless the file says otherwise.
        normed_values: values are normed, without weights.
        scaling: of queries times keys, where it does not follow from the size of heads.
        large: number of layers of a model that scales queries by its hidden size and not by its heads'; 0 for none.
        rms_norms: norms are RMS norms, whatever a file calls their epsilon.
        gates_attention: the rows of each head's query are followed by those of a gate of the attention's output.
        heads_in_turns: value heads are in turns of their key heads: first the first one of each.
        unrotated_if_original: there are no positions, unless the file says that RoPE was finetuned.
        one_part: a layer is an attention, a mixer or an MLP, which the first norm belongs to.
        ungated_experts: experts have no gates.
        rounds_constants: transformers has factors on embeddings of layers in the model's dtype.
        checkpoint_names: of transformers, by llama.cpp's.
        other_forms: llama.cpp's names of tensors that transformers' checkpoints have in another form, or as one.
    """

    interleaved: bool = False
    adjacent: bool = False
    final_norm: str = FINAL_NORM
    norms: Mapping[str, str] = field(default_factory=lambda: BEFORE)
    norms_after_rope: bool = False
    parallel: bool = False
    activation: Activation = Activation.SILU
    activation_parameters: tuple[float, ...] = ()
    fused_mlp: bool = False
    scales_embeddings: bool = False
    divides_logits: bool = False
    norm_offset: float = 0.0
    full_every: int = 0
    local_theta: float = 0.0
    whole_ramp: bool = True
    local_plain: bool = False
    unrotated_every: int = 0
    rotates_sliding: bool = False
    scoring: Scoring = Scoring.SOFTMAX
    normalizes_experts: bool = False
    normed_values: bool = False
    scaling: float = 0.0
    large: int = 0
    rms_norms: bool = False
    gates_attention: bool = False
    heads_in_turns: bool = False
    unrotated_if_original: bool = False
    one_part: bool = False
    ungated_experts: bool = False
    rounds_constants: bool = False
    checkpoint_names: Mapping[str, str] = field(default_factory=lambda: _CHECKPOINT_NAMES)
    other_forms: Collection[str] = ()

    def module_name(self, name: str, layer: int | str | None) -> str:
        """The name in transformers of a module, in a layer or outside of them; nothing if it is not known."""
        return self.checkpoint_names.get(name, "").format(layer=layer)

    def parameter_name(self, name: str, layer: int | str | None, kind: str) -> str:
        """The name in transformers of a module's weight or bias; some parameters have no module of their own."""
        module = self.module_name(name, layer)
        return module if module.endswith(_PARAMETERS) else f"{module}.{kind}"


_GEMMA = Architecture(activation=Activation.GELU_TANH, scales_embeddings=True, norm_offset=1.0)
_GEMMA_2 = replace(_GEMMA, norms=BEFORE | _AFTER, checkpoint_names=_CHECKPOINT_NAMES | _SANDWICH)
_GEMMA_4 = Architecture(
    activation=Activation.GELU_TANH,
    scales_embeddings=True,
    norms=BEFORE | _AFTER,
    local_plain=True,
    normed_values=True,
    scaling=1.0,
    normalizes_experts=True,
    checkpoint_names=_CHECKPOINT_NAMES | _SANDWICH | _OWN_EMBEDDINGS | _BESIDE,
)
_GRANITE = Architecture(interleaved=True, divides_logits=True, normalizes_experts=True)
_NEMOTRON_H = Architecture(
    activation=Activation.RELU_SQUARED,
    scoring=Scoring.SIGMOID,
    unrotated_every=1,
    rms_norms=True,
    one_part=True,
    ungated_experts=True,
    checkpoint_names=_CHECKPOINT_NAMES | _NEMOTRON_H_NAMES,
    other_forms={*_state_space(""), "exp_probs_b"},
)
_COHERE = Architecture(
    adjacent=True,
    parallel=True,
    norms={"before_attention": "attn_norm", "before_mlp": "attn_norm"},
    checkpoint_names={name: _CHECKPOINT_NAMES[name] for name in _CHECKPOINT_NAMES if not name.endswith("_norm")}
    | {name: _CHECKPOINT_NAMES[name] for name in ("attn_norm", FINAL_NORM)},
)
_LFM2 = Architecture(
    final_norm="token_embd_norm",
    checkpoint_names=_CHECKPOINT_NAMES | _LFM2_NAMES,
    other_forms={"shortconv.conv"},
)
_AFTER_ONLY = Architecture(norms=_AFTER, checkpoint_names=_CHECKPOINT_NAMES | _SANDWICH)
_LATE_NORM = Architecture(
    norms=BEFORE | {"before_mlp": "post_attention_norm"}, checkpoint_names=_CHECKPOINT_NAMES | _LATE
)
_QWEN_HYBRID = replace(
    _LATE_NORM,
    norm_offset=1.0,
    gates_attention=True,
    heads_in_turns=True,
    normalizes_experts=True,
    checkpoint_names=_CHECKPOINT_NAMES | _LATE | _QWEN_3_5,
    other_forms={*_QWEN_3_5, "ssm_ba"},
)

ARCHITECTURES = {
    "llama": Architecture(interleaved=True, normalizes_experts=True),
    "mistral3": Architecture(interleaved=True, normalizes_experts=True),
    "smollm3": Architecture(interleaved=True, unrotated_every=4),
    "arcee": Architecture(interleaved=True, activation=Activation.RELU_SQUARED),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "qwen2moe": Architecture(),
    "qwen3moe": Architecture(normalizes_experts=True),
    "olmo2": replace(_AFTER_ONLY, full_every=4, local_plain=True),
    "olmoe": Architecture(),
    "exaone4": replace(_AFTER_ONLY, full_every=4, rotates_sliding=True),
    "seed_oss": _LATE_NORM,
    "glm4": Architecture(
        adjacent=True, norms=BEFORE | _AFTER, fused_mlp=True, checkpoint_names=_CHECKPOINT_NAMES | _GLM
    ),
    "glm4moe": replace(
        _LATE_NORM, scoring=Scoring.SIGMOID, checkpoint_names=_CHECKPOINT_NAMES | _LATE | _SHARED_EXPERTS
    ),
    "chatglm": Architecture(
        adjacent=True, fused_mlp=True, checkpoint_names=_CHECKPOINT_NAMES | {"ffn_up": _GLM["ffn_up"]}
    ),
    "deepseek2": Architecture(checkpoint_names=_CHECKPOINT_NAMES | _SHARED_EXPERTS | _LATENT),
    "dots1": Architecture(scoring=Scoring.SIGMOID, checkpoint_names=_CHECKPOINT_NAMES | _SHARED_EXPERTS),
    "ernie4_5": Architecture(adjacent=True),
    "ernie4_5-moe": Architecture(
        adjacent=True, normalizes_experts=True, checkpoint_names=_CHECKPOINT_NAMES | _SHARED_EXPERTS | _ERNIE_EXPERTS
    ),
    "hunyuan-dense": Architecture(norms_after_rope=True, checkpoint_names=_CHECKPOINT_NAMES | _HUNYUAN),
    "hunyuan-moe": Architecture(
        norms_after_rope=True,
        normalizes_experts=True,
        checkpoint_names=_CHECKPOINT_NAMES | _HUNYUAN | _HUNYUAN_EXPERTS,
    ),
    "granite": _GRANITE,
    "granitemoe": replace(_GRANITE, checkpoint_names=_CHECKPOINT_NAMES | _GRANITE_EXPERTS),
    "gpt-oss": replace(
        _LATE_NORM,
        activation=Activation.CLAMPED_SWIGLU,
        activation_parameters=(1.702, 7.0, 1.0),
        full_every=2,
        whole_ramp=False,
        normalizes_experts=True,
        checkpoint_names=_CHECKPOINT_NAMES | _LATE | _GPT_OSS,
    ),
    "command-r": _COHERE,
    "cohere2": replace(_COHERE, full_every=4, rotates_sliding=True),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA_2, full_every=2, large=46),
    "gemma3": replace(_GEMMA_2, full_every=6, local_theta=10_000.0, local_plain=True, large=62),
    "gemma3n": replace(
        _GEMMA_4,
        local_theta=10_000.0,
        rounds_constants=True,
        checkpoint_names=_CHECKPOINT_NAMES | _SANDWICH | _OWN_EMBEDDINGS | _ALTUP,
    ),
    "gemma4": _GEMMA_4,
    "phi3": Architecture(fused_mlp=True, checkpoint_names=_CHECKPOINT_NAMES | _FUSED),
    "starcoder2": Architecture(activation=Activation.GELU_TANH, checkpoint_names=_CHECKPOINT_NAMES | _UNGATED),
    "nemotron": Architecture(activation=Activation.RELU_SQUARED, norm_offset=1.0),
    "stablelm": Architecture(),
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2,
        scoring=Scoring.SIGMOID,
        normalizes_experts=True,
        checkpoint_names=_CHECKPOINT_NAMES | _LFM2_NAMES | _LFM2_EXPERTS,
        other_forms={"shortconv.conv", "exp_probs_b"},
    ),
    "granitehybrid": replace(
        _GRANITE,
        unrotated_if_original=True,
        checkpoint_names=_CHECKPOINT_NAMES | _GRANITE_EXPERTS | _GRANITE_HYBRID,
        other_forms={*_state_space("")},
    ),
    "falcon-h1": Architecture(checkpoint_names=_CHECKPOINT_NAMES | _FALCON_H1, other_forms={*_state_space("")}),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "qwen35": _QWEN_HYBRID,
    "qwen35moe": _QWEN_HYBRID,
    "qwen3next": replace(_QWEN_HYBRID, heads_in_turns=False, checkpoint_names=_CHECKPOINT_NAMES | _LATE | _QWEN_3_NEXT),
}
"""By llama.cpp's name."""
