"""What a row of a family says, and the names that most families share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from h2o_stream.models.gguf import GgufFile
from h2o_stream.native.abi import Activation, GateKind, NormKind, Scoring
from h2o_stream.runtime.parameters import Parameters

EMBEDDING, OUTPUT, FINAL_NORM = "token_embd", "output", "output_norm"
LAYER_EMBEDDINGS, POSITIONS = "per_layer_token_embd", "position_embd"
"""llama.cpp's names of what is outside of layers, without ``.weight``."""


def mlp_names(module: str, kind: str = "") -> dict[str, str]:
    """Names of an MLP's matrices; with `kind` ``_exps`` those of experts, with ``_shexp`` of the shared expert."""
    return {f"ffn_{name}{kind}": f"{module}.{name}_proj" for name in ("gate", "up", "down")}


NAMES = {
    EMBEDDING: "model.embed_tokens",
    OUTPUT: "lm_head",
    FINAL_NORM: "model.norm",
    "attn_norm": "input_layernorm",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v")},
    **{f"attn_{name}_norm": f"self_attn.{name}_norm" for name in ("q", "k")},
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **mlp_names("mlp"),
    "ffn_gate_inp": "mlp.gate",
    **mlp_names("mlp.experts", "_exps"),
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **mlp_names("mlp.shared_expert", "_shexp"),
}
"""transformers' names by those of llama.cpp; in layers without ``model.layers.N``."""

SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Names of norms where every block has one before and after it, or after it only."""

AS_MLP = {"moe_intermediate_size": None}
"""Entries of a config for experts that have the size of an MLP, whatever else it says."""

SHARED_EXPERTS = mlp_names("mlp.shared_experts", "_shexp") | {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
"""Names of experts for all tokens, where several are stored as one."""

MIXER_PARTS = {"ssm_conv1d": "conv1d", "ssm_dt": "dt_bias", "ssm_a": "A_log", "ssm_norm": "norm", "ssm_out": "out_proj"}
"""Names of the parts of recurrent mixers with heads."""


def state_space(module: str) -> dict[str, str]:
    """Names of a Mamba-2."""
    return {name: f"{module}.{part}" for name, part in (MIXER_PARTS | {"ssm_in": "in_proj", "ssm_d": "D"}).items()}


BEFORE = {"before_attention": "attn_norm", "before_mlp": "ffn_norm"}
AFTER = {"after_attention": "post_attention_norm", "after_mlp": "post_ffw_norm"}
"""llama.cpp's names of a layer's norms, by role."""


@dataclass(frozen=True)
class Architecture:
    """What the header of a family's GGUF files and the names of its tensors do not say.

    Biases, and norms of queries and keys, are there if the file has them.

    Attributes:
        model_type: transformers' name, or how it follows from the parameters; llama.cpp's if empty.
        config: fields of transformers' config that only this family has.
        rope_rows_permuted: GGUF files have the rows of queries and keys in the order of RoPE by adjacent pairs.
        adjacent: RoPE rotates adjacent pairs, in files as in transformers' models.
        final_norm: llama.cpp's name of the norm before the output layer.
        norms: llama.cpp's names of a layer's norms, by role; the layer has these and no others.
        norms_after_rope: norms of queries and keys come after RoPE.
        parallel: the MLP reads the attention's input.
        activation: activation of the MLP.
        activation_parameters: numbers that the activation takes, see `abi.h`.
        fused_mlp: ``ffn_up`` has the gate's rows, then its own.
        scales_embeddings: embeddings are multiplied by the root of the hidden size.
        divides_logits: the file's factor on logits is a divisor.
        norm_offset: added to the weights of norms in transformers' checkpoints; GGUF files have it added.
        full_every: every so many layers one attends to everything, the others to a sliding window; 0: all are alike.
        local_theta: base of RoPE in layers with a sliding window, if it is another one that files do not state.
        whole_ramp: YaRN mixes frequencies between whole numbers of dimensions.
        local_plain: RoPE in layers with a sliding window is not scaled.
        unrotated_every: every so many layers one has no positions; 0 for none.
        rotates_sliding: where some layers slide, the others have no positions.
        scoring: how a router's logits become scores, unless the file says it.
        normalizes_experts: the weights of a token's experts are divided by their sum, unless the file says otherwise.
        mixer_norms: norms of layers with a recurrent mixer, if they are others.
        optional_norms: roles of norms that not all layers have.
        normed_values: values are normed, without weights.
        scaling: scaling of queries times keys, where it does not follow from the size of heads.
        softcaps: limits of attention's and of the model's logits, for files that do not state them.
        scales_by_hidden_at_layers: models with this many layers scale queries by hidden_size / heads; 0: none.
        norm: kind of all norms; None: RMS, or as GGUF files call their epsilon.
        gates_attention: the rows of each head's query are followed by those of a gate of the attention's output.
        interleaved_heads: value heads of GGUF files are interleaved by key head: v0 of k0, v0 of k1, ..
        fused_by_key_head: transformers has queries, keys, values and gates of mixers in one matrix, by key head.
        interleaved_experts: transformers has the rows of gate and up of experts interleaved, and matrices transposed.
        unrotated_if_original: there are no positions, unless the file says that RoPE was finetuned.
        one_part: a layer is an attention, a mixer or an MLP, which the first norm belongs to.
        ungated_experts: experts have no gates.
        rounds_constants: the factors on embeddings of layers are rounded to the model's dtype, as in transformers.
        bare_norms: norms have no weights; queries and keys are normed in layers with RoPE.
        norms_embedding: what goes into the first layer is normed by the final norm.
        swaps_halves: RoPE rotates in the other direction.
        qkv_by_head: a fused matrix has queries, keys and values of each head together.
        reorders_pairs: transformers puts pairs into halves before RoPE of latent attention; None: by the router.
        gate_kind: what the gate of the attention's output goes through, if it has a matrix of its own.
        weighs_inputs: the weights of a token's experts are factors on what goes into them.
        biases_logits: what is added for the choice of experts is added to logits, so that only zeros are described.
        transposed_experts: transformers has the matrices of experts transposed.
        checkpoint_names: transformers' names by those of llama.cpp, as in `NAMES`.
        learned_offset: row of the embedding of position 0, where positions have embeddings.
        heats_unrotated: only layers without positions have temperatures, by token index.
        only_modules: only models in memory are described: transformers' own cache is needed for them.
        renamed: parts of names in checkpoints by which they differ from `checkpoint_names`, and what replaces them.
        layers: transformers' name of the list of layers.
        stored_as_in_gguf: llama.cpp's names of tensors that transformers' checkpoints have in another form, or as one;
            folders of packed weights then have all tensors as the GGUF file has them.
    """

    model_type: str | Callable[[Parameters], str] = ""
    config: Callable[[GgufFile, Parameters], Mapping[str, Any]] = lambda file, parameters: {}
    rope_rows_permuted: bool = False
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
    mixer_norms: Mapping[str, str] = field(default_factory=dict)
    optional_norms: Collection[str] = ()
    normed_values: bool = False
    scaling: float = 0.0
    scales_by_hidden_at_layers: int = 0
    softcaps: tuple[float, float] = (0.0, 0.0)
    norm: NormKind | None = None
    gates_attention: bool = False
    interleaved_heads: bool = False
    fused_by_key_head: bool = False
    interleaved_experts: bool = False
    unrotated_if_original: bool = False
    one_part: bool = False
    ungated_experts: bool = False
    rounds_constants: bool = False
    bare_norms: bool = False
    norms_embedding: bool = False
    swaps_halves: bool = False
    qkv_by_head: bool = False
    reorders_pairs: bool | None = None
    gate_kind: GateKind = GateKind.SIGMOID_GATE
    weighs_inputs: bool = False
    biases_logits: bool = False
    transposed_experts: bool = False
    checkpoint_names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    learned_offset: int = 0
    heats_unrotated: bool = False
    only_modules: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    layers: str = "model.layers"
    stored_as_in_gguf: Collection[str] = ()

    def with_names(self, names: Mapping[str, str], **changes: Any) -> Architecture:
        """A row like this one with further names, and with changes."""
        return replace(self, checkpoint_names={**self.checkpoint_names, **names}, **changes)

    def transformers_type(self, parameters: Parameters) -> str:
        """Transformers' name of a model; nothing if it is llama.cpp's."""
        return self.model_type if isinstance(self.model_type, str) else self.model_type(parameters)

    def module_name(self, name: str, layer: int | None) -> str:
        """The name in transformers of a module, in a layer or outside of them; nothing if it is not known."""
        module = self.checkpoint_names.get(name, "")
        return module if layer is None or not module else f"{self.layers}.{layer}.{module}"

    def rotates(self, number: int, window: int | None, some_slide: bool) -> bool:
        """Whether a layer has positions, by its number and sliding window."""
        every = self.unrotated_every
        if every and (number + 1) % every == 0:
            return False
        return not (self.rotates_sliding and some_slide and window is None)


def parameter_names(module: str, kind: str) -> tuple[str, str]:
    """What a module's ``weight`` or ``bias`` may be called in transformers: some are parameters of another module."""
    bare = module if kind == "weight" or module.endswith("_bias") else f"{module}_bias"
    return f"{module}.{kind}", bare


@dataclass(frozen=True)
class ModelType:
    """What the ``config.json`` of a transformers checkpoint does not say.

    Attributes:
        architecture: row of the family, with the names that checkpoints have.
        defaults: entries that it may leave out, beside those of `published`, and ones that all models have.
        older: returns entries that older configs of this type say in another way.
        fixed: entries as its class has them, whatever is said.
        slides_everywhere: all layers have the sliding window if there is one.
        numbers: fields of `Parameters` that follow from entries that only this type has.
    """

    architecture: Architecture
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    slides_everywhere: bool = False
    older: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}
    numbers: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}


AFTER_ONLY = Architecture(norms=AFTER).with_names(SANDWICH)
"""Every block has a norm after it, and none before."""

LATE_NORM = Architecture(norms=BEFORE | {"before_mlp": "post_attention_norm"}).with_names(
    {"post_attention_norm": "post_attention_layernorm"}
)
"""The norm before the MLP is called one after the attention."""
