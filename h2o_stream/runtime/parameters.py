"""Numbers that describe a decoder-only transformer besides its weights, from the header of a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from h2o_stream.models.gguf import GgufFile
from h2o_stream.native.abi import GroupWorth, NormKind, Scoring
from h2o_stream.native.description import DescriptionError
from h2o_stream.native.latent import LatentSizes
from h2o_stream.runtime.architectures import ARCHITECTURES, EMBEDDING, OUTPUT, Architecture
from h2o_stream.runtime.file_altup import AltUpParameters, altup_of
from h2o_stream.runtime.file_ropes import RopeParameters, is_latent, ropes_of, yarn_magnitude, yarn_share


@dataclass(frozen=True)
class ExpertParameters:
    """Numbers of the layers with experts.

    Attributes:
        count: experts of a layer.
        chosen: experts per token.
        inner_size: of each.
        shared_size: of the expert for all tokens, 0 if there is none; several are one of their sizes' sum.
        scoring: how a router's logits become scores.
        normalized: whether the weights of a token's experts are divided by their sum.
        scale: factor on weights.
        groups: of equal size, 0 if the experts are in none.
        chosen_groups: how many of them a token's experts are chosen from.
    """

    count: int
    chosen: int
    inner_size: int
    shared_size: int
    scoring: Scoring
    normalized: bool
    scale: float
    groups: int = 0
    chosen_groups: int = 0

    @property
    def group_worth(self) -> GroupWorth:
        """By which groups are chosen: those of sigmoids by the best two experts."""
        return GroupWorth.BEST_TWO if self.groups and self.scoring == Scoring.SIGMOID else GroupWorth.BEST_ONE


@dataclass(frozen=True)
class MixerParameters:
    """Numbers of the recurrent mixers with heads.

    Attributes:
        key_heads: of queries and keys.
        heads: of values.
        key_size: of queries and keys.
        value_size: of values.
    """

    key_heads: int
    heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer, where they are not those of all: see `Parameters`."""

    head_size: int
    kv_heads: int
    inner_size: int


@dataclass(frozen=True, eq=False)
class Parameters:
    """Numbers of a model.

    Attributes:
        num_layers: decoder layers.
        hidden_size: of the residual stream.
        inner_size: of the MLP.
        vocabulary: tokens.
        query_heads: of each layer.
        kv_heads: of each layer.
        head_size: of queries, keys and values.
        norm: kind of all norms.
        epsilon: of norms.
        context: positions it was trained for.
        ropes: RoPE of each layer, None in a layer without positions.
        tied: whether the output layer is the embedding.
        scaling: of queries times keys.
        sliding: window of each layer, None if it sees everything.
        softcap: of queries times keys, 0 for none.
        logit_softcap: of logits, 0 for none.
        embedding_scale: factor on embeddings.
        residual_scale: factor on what layers add.
        logit_scale: factor on logits.
        temperature: of queries, and the positions of the original model; None for none.
        norms_after_rope: norms of queries and keys come after RoPE, so that it cannot be changed later.
        experts: of layers that have experts.
        latent: sizes of latent keys and values, None if there are none.
        latent_queries: size of latent queries, 0 if there are none.
        mixer: of recurrent layers that have heads.
        layer_shapes: of each layer, if they differ.
        borrowing: the last layers, so many, use keys and values of the last layer of their kind before them.
        own_embedding: size of the embeddings of tokens in each layer, 0 for none.
        altup: of versions of the residual stream, None if there is one.
    """

    num_layers: int
    hidden_size: int
    inner_size: int
    vocabulary: int
    query_heads: int
    kv_heads: int
    head_size: int
    norm: NormKind
    epsilon: float
    context: int
    ropes: tuple[RopeParameters | None, ...]
    tied: bool
    scaling: float
    sliding: tuple[int | None, ...]
    softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    temperature: tuple[float, int] | None = None
    norms_after_rope: bool = False
    experts: ExpertParameters | None = None
    latent: LatentSizes | None = None
    latent_queries: int = 0
    mixer: MixerParameters | None = None
    layer_shapes: tuple[LayerShape, ...] = ()
    borrowing: int = 0
    own_embedding: int = 0
    altup: AltUpParameters | None = None

    def layer_shape(self, layer: int) -> LayerShape:
        """Sizes of a layer."""
        shared = LayerShape(self.head_size, self.kv_heads, self.inner_size)
        return self.layer_shapes[layer] if self.layer_shapes else shared

    def source(self, layer: int) -> int | None:
        """The layer whose keys and values a layer uses, None if it has its own.

        Raises:
            DescriptionError: there is no such layer.
        """
        first = self.num_layers - self.borrowing
        if layer < first:
            return None
        alike = [other for other in range(first) if (self.sliding[other] is None) == (self.sliding[layer] is None)]
        if not alike:
            raise DescriptionError(f"layer {layer} uses keys of an earlier layer of its kind, and there is none")
        return alike[-1]

    def reads(self, tensor: str) -> bool:
        """Whether a tensor of a file is read: later layers only guess further tokens, some use keys of earlier ones."""
        layer, name, _ = tensor_name(tensor)
        if layer is None or layer >= self.num_layers:
            return layer is None
        return name not in _KEYS_AND_VALUES or self.source(layer) is None

    @property
    def windows(self) -> list[int | None]:
        """The windows of layers that slide while others do not; such layers do not follow the plan of a cache."""
        return [None] * self.num_layers if None not in self.sliding else list(self.sliding)

    @property
    def refused_positions(self) -> Collection[str]:
        """Where RoPE cannot see the kept tokens: nowhere else than trained, or not there."""
        turned = {"gap", "rolling"} if self.norms_after_rope else set[str]()
        return turned if all(rope is None or rope.fixed for rope in self.ropes) else turned | {"absolute"}

    @property
    def max_distance(self) -> int:
        """Largest distance it was trained for: its context, the longest window if all layers slide, or that of RoPE."""
        windows = [window for window in self.sliding if window and None not in self.sliding]
        limits = [rope.max_distance for rope in self.ropes if rope and rope.max_distance]
        return min([self.context, *windows, *limits])


_KEYS_AND_VALUES = ("attn_k", "attn_v", "attn_k_norm")
"""What layers that use those of another one need not have."""

_READ = """
activation_sparsity_scale altup.active_idx altup.num_inputs
attention.head_count attention.head_count_kv attention.key_length attention.key_length_mla attention.key_length_swa
attention.kv_lora_rank attention.layer_norm_epsilon attention.q_lora_rank attention.recurrent_layers
attention.shared_kv_layers attention.value_length_mla attention.value_length_swa embedding_length_per_layer_input
rope.dimension_count_swa
attention.layer_norm_rms_epsilon attention.scale attention.sliding_window attention.sliding_window_pattern
attention.temperature_scale rope.scaling.yarn_log_multiplier
attention.value_length attn_logit_softcapping block_count context_length embedding_length embedding_scale
expert_count expert_feed_forward_length expert_gating_func expert_group_count expert_group_used_count
expert_shared_count expert_shared_feed_forward_length expert_used_count expert_weights_norm expert_weights_scale
feed_forward_length final_logit_softcapping full_attention_interval
interleave_moe_layer_step leading_dense_block_count logit_scale nextn_predict_layers residual_scale
rope.dimension_count rope.dimension_sections rope.freq_base rope.freq_base_swa rope.scaling.attn_factor
rope.scaling.factor rope.scaling.finetuned rope.scaling.original_context_length rope.scaling.type
rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.yarn_ext_factor shortconv.l_cache
ssm.conv_kernel ssm.group_count ssm.inner_size ssm.state_size ssm.time_step_rank vocab_size
"""
_KEYS = frozenset(_READ.split())
"""Keys of GGUF files that are read, or follow from weights."""

_NEUTRAL = {
    "attention.causal": (True,),
    "rope.scaling.yarn_attn_factor": (1,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
"""Keys that are not, with values that change nothing."""

NOT_WEIGHTS = re.compile(r"rope_(freqs|factors_(long|short))\.weight|blk\.\d+\.attn_rot_embd")
"""Tensors of GGUF files that are no weights in transformers."""


def parameters_of_gguf(file: GgufFile) -> Parameters:
    """The parameters of a GGUF file.

    Raises:
        DescriptionError: it has parameters or weights that are not known here, or misses one.
    """
    name = file.architecture
    if name not in ARCHITECTURES:
        raise DescriptionError(f"{name} is not in the table of architectures")
    architecture = ARCHITECTURES[name]

    def get(key: str) -> Any:
        return file.metadata.get(f"{name}.{key}")

    for key, value in file.metadata.items():
        inner = key.removeprefix(f"{name}.")
        if inner != key and inner not in _KEYS and value not in _NEUTRAL.get(inner, ()):
            raise DescriptionError(f"{key} is {value}")
    try:
        heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
        count = int(get("block_count")) - int(get("nextn_predict_layers") or 0)
        _check_names(file, architecture, count)
        latent = _latent(get)
        head_size = latent.head_size if latent else int(get("attention.key_length") or hidden // heads)
        if not latent and int(get("attention.value_length") or head_size) != head_size:
            raise DescriptionError("heads of keys and values have different sizes")
        epsilon, sliding = get("attention.layer_norm_rms_epsilon"), _sliding(architecture, count, get)
        plain_scaling = architecture.scaling or (hidden / heads if architecture.large == count else head_size) ** -0.5
        logit_scale = float(get("logit_scale") or 1.0)
        return Parameters(
            num_layers=count,
            hidden_size=hidden,
            inner_size=_most(get("feed_forward_length")),
            vocabulary=file.tensors[f"{EMBEDDING}.weight"].shape[0],
            query_heads=heads,
            kv_heads=heads if latent else _most(get("attention.head_count_kv")) or heads,
            head_size=head_size,
            norm=NormKind.LAYER if epsilon is None and not architecture.rms_norms else NormKind.RMS,
            epsilon=float(get("attention.layer_norm_epsilon") if epsilon is None else epsilon),
            context=int(get("context_length")),
            ropes=ropes_of(file, architecture, head_size, sliding),
            tied=f"{OUTPUT}.weight" not in file.tensors,
            scaling=float(get("attention.scale") or plain_scaling) * _magnitude(file, get),
            sliding=sliding,
            softcap=float(get("attn_logit_softcapping") or 0),
            logit_softcap=float(get("final_logit_softcapping") or 0),
            embedding_scale=float(get("embedding_scale") or (hidden**0.5 if architecture.scales_embeddings else 1.0)),
            residual_scale=float(get("residual_scale") or 1.0),
            logit_scale=1 / logit_scale if architecture.divides_logits else logit_scale,
            temperature=(float(scale), int(get("rope.scaling.original_context_length")))
            if (scale := get("attention.temperature_scale"))
            else None,
            norms_after_rope=architecture.norms_after_rope and "blk.0.attn_q_norm.weight" in file.tensors,
            experts=_experts(file, architecture, get) if get("expert_count") else None,
            latent=latent,
            layer_shapes=_layer_shapes(count, head_size, sliding, get),
            borrowing=int(get("attention.shared_kv_layers") or 0),
            own_embedding=int(get("embedding_length_per_layer_input") or 0),
            altup=altup_of(file, get) if get("altup.num_inputs") else None,
            latent_queries=int(get("attention.q_lora_rank") or 0),
            mixer=_mixer(get) if get("ssm.time_step_rank") else None,
        )
    except (LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        raise DescriptionError(f"a parameter is missing or no number: {error}") from error


def _latent(get: Callable[[str], Any]) -> LatentSizes | None:
    """Sizes of latent keys and values. Newer files have those of all heads together where older ones have a head's."""
    if not (rank := get("attention.kv_lora_rank")):
        return None
    size, value_size = (get(f"attention.{name}_length_mla") or get(f"attention.{name}_length") for name in _KEY_VALUE)
    rotated = int(get("rope.dimension_count"))
    return LatentSizes(int(rank), rotated, int(size) - rotated, int(value_size))


_KEY_VALUE = ("key", "value")


def _magnitude(file: GgufFile, get: Callable[[str], Any]) -> float:
    """The factor of YaRN on queries times keys that RoPE does not have."""
    if not is_latent(file) or get("rope.scaling.type") != "yarn":
        return 1.0
    return yarn_magnitude(float(get("rope.scaling.factor")), yarn_share(file)) ** 2


def _most(sizes: Any) -> int:
    """The size in those layers that have the part, given for each layer, or for all."""
    return max(map(int, sizes)) if isinstance(sizes, list) else int(sizes or 0)


def _mixer(get: Callable[[str], Any]) -> MixerParameters:
    heads = int(get("ssm.time_step_rank"))
    return MixerParameters(
        int(get("ssm.group_count")), heads, int(get("ssm.state_size")), int(get("ssm.inner_size")) // heads
    )


def _layer_shapes(
    layers: int, head_size: int, sliding: Sequence[int | None], get: Callable[[str], Any]
) -> tuple[LayerShape, ...]:
    """Sizes of each layer, if layers with a sliding window have heads of their own size.

    Raises:
        DescriptionError: heads of keys and values have different sizes.
    """
    local = get("attention.key_length_swa")
    if local is None:
        return ()
    if local != get("attention.value_length_swa"):
        raise DescriptionError("heads of keys and values have different sizes")
    heads, inner = (
        size if isinstance(size, list) else [size] * layers
        for size in (get("attention.head_count_kv"), get("feed_forward_length"))
    )
    return tuple(
        LayerShape(head_size if window is None else int(local), int(heads[number]), int(inner[number]))
        for number, window in enumerate(sliding)
    )


def _check_names(file: GgufFile, architecture: Architecture, layers: int) -> None:
    """Check that the weights of a file are among those of its architecture; later layers only guess further tokens."""
    for name in file.tensors:
        layer, inner, _ = tensor_name(name)
        known = inner in architecture.checkpoint_names or inner in architecture.other_forms
        if not known and not NOT_WEIGHTS.fullmatch(name) and (layer is None or layer < layers):
            raise DescriptionError(f"it has {name}")


def tensor_name(full: str) -> tuple[int | None, str, str]:
    """The layer of a tensor of a GGUF file, its name in it, and what it is of that: ``weight``, ``bias`` or nothing."""
    parts = re.fullmatch(r"(?:blk\.(\d+)\.)?(.+?)(?:\.(weight|bias))?", full)
    assert parts is not None
    return None if parts[1] is None else int(parts[1]), parts[2], parts[3] or ""


def _sliding(architecture: Architecture, layers: int, get: Callable[[str], Any]) -> tuple[int | None, ...]:
    """The sliding window of each layer."""
    window, every = get("attention.sliding_window"), architecture.full_every
    slides = get("attention.sliding_window_pattern")
    if not isinstance(slides, list):
        every = slides or every
        slides = [not every or (number + 1) % every != 0 for number in range(layers)]
    return tuple(int(window) if window and slides[number] else None for number in range(layers))


_SCORINGS = {1: Scoring.SOFTMAX, 2: Scoring.SIGMOID, 3: Scoring.SOFTMAX}
"""By llama.cpp's number, ``expert_gating_func``."""


def _experts(file: GgufFile, architecture: Architecture, get: Callable[[str], Any]) -> ExpertParameters:
    normalized, scoring = get("expert_weights_norm"), get("expert_gating_func")
    groups, chosen_groups = (int(get(f"expert_group_{name}") or 1) for name in ("count", "used_count"))
    matrices = {name: tensor for name, tensor in file.tensors.items() if re.search(r"ffn_(gate_)?up_\w+\.weight", name)}
    sizes = {name.split(".")[2]: tensor.shape[-2] for name, tensor in matrices.items()}
    return ExpertParameters(
        count=int(get("expert_count")),
        chosen=int(get("expert_used_count")),
        inner_size=sizes["ffn_up_exps"] if "ffn_up_exps" in sizes else sizes["ffn_gate_up_exps"] // 2,
        shared_size=sizes.get("ffn_up_shexp", 0),
        scoring=_SCORINGS[scoring] if scoring else architecture.scoring,
        normalized=architecture.normalizes_experts if normalized is None else bool(normalized),
        scale=float(get("expert_weights_scale") or 1.0),
        groups=groups if groups > chosen_groups else 0,
        chosen_groups=chosen_groups if groups > chosen_groups else 0,
    )
