"""Numbers that describe a decoder-only transformer besides its weights, whatever file they are from."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, fields

from h2o_stream.native.abi import MAX_VERSIONS, GroupWorth, NormKind, Scoring
from h2o_stream.native.description import DescriptionError
from h2o_stream.native.latent import LatentSizes
from h2o_stream.native.matrix import require
from h2o_stream.runtime.rotations import MAX_FLOAT, RopeParameters

MAX_SIZE, MAX_LAYERS, MAX_TOKENS, MAX_WINDOW = 2**24, 2**16, 2**31 - 1, 2**20
"""Largest vectors, numbers of layers, token indices, and windows that are held whole: beyond all models."""

_FACTORS = (
    *("scaling", "softcap", "logit_softcap", "embedding_scale", "residual_scale", "logit_scale", "epsilon"),
    *("clip", "value_scale", "latent_epsilon"),
)


def check_range(value: int, what: str, limit: int, minimum: int = 1) -> None:
    """Raises DescriptionError unless a whole number is in a range."""
    require(minimum <= value <= limit, f"{what} is {value}, not a number from {minimum} to {limit}")


def _check_number(value: float, what: str) -> None:
    """Raises DescriptionError unless a number is finite in float32."""
    fits = not isinstance(value, complex) and abs(value) < MAX_FLOAT
    require(fits, f"{what} is {value}, not a number that float32 has")


@dataclass(frozen=True)
class ExpertParameters:
    """Numbers of the layers with experts.

    Attributes:
        shared_size: size of the shared expert (the sum, if there are several), 0 if there is none.
        scoring: how a router's logits become scores.
        normalized: whether the weights of a token's experts are divided by their sum.
        scale: factor on weights.
        groups: number of groups of equal size, 0 if there are none.
        chosen_groups: how many of them a token's experts are chosen from.
        jitter: noise of a sparse mixer, see `Router`.

    Raises:
        DescriptionError: they do not fit each other.
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
    jitter: float = 0.0

    def __post_init__(self) -> None:
        check_range(self.count, "expert_count, num_experts", MAX_SIZE)
        check_range(self.chosen, "expert_used_count, num_experts_per_tok", self.count)
        check_range(self.inner_size, "the size of experts", MAX_SIZE)
        check_range(self.shared_size, "the size of the shared expert", MAX_SIZE, 0)
        check_range(self.groups, "expert_group_count", self.count, 0)
        check_range(self.chosen_groups, "expert_group_used_count", self.groups, 0)
        _check_number(self.scale, "expert_weights_scale")
        _check_number(self.jitter, "router_jitter_noise")

    @property
    def group_worth(self) -> GroupWorth:
        """By which groups are chosen: those of sigmoids by the best two experts."""
        return GroupWorth.BEST_TWO if self.groups and self.scoring == Scoring.SIGMOID else GroupWorth.BEST_ONE


@dataclass(frozen=True)
class MixerParameters:
    """Numbers of the recurrent mixers with heads.

    Attributes:
        key_heads: number of heads of queries and keys.
        heads: number of value heads.
        step_limits, norm_before_gate, beta_scale: see `native.mixers`.
        epsilon: epsilon of the norm, 0 if it is that of all.

    Raises:
        DescriptionError: they do not fit each other.
    """

    key_heads: int
    heads: int
    key_size: int
    value_size: int
    step_limits: tuple[float, float] = (0.0, math.inf)
    norm_before_gate: bool = False
    beta_scale: float = 1.0
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        check_range(self.heads, "ssm.time_step_rank", MAX_SIZE)
        check_range(self.key_heads, "ssm.group_count", self.heads)
        require(self.heads % self.key_heads == 0, f"{self.heads} heads do not share {self.key_heads} (ssm.group_count)")
        check_range(self.key_size, "ssm.state_size", MAX_SIZE // self.key_heads)
        check_range(self.value_size, "ssm.inner_size of a head", MAX_SIZE // self.heads)
        require(0 <= self.step_limits[0] < self.step_limits[1], f"time_step_limit is {self.step_limits}")
        _check_number(self.epsilon, "the epsilon of a mixer's norm")


@dataclass(frozen=True)
class AltUpParameters:
    """Numbers of a model with `count` versions of the residual stream, of which layers read the one that is active.

    Attributes:
        gate_deviations: deviations of each layer, see `native.description.Mlp`.
        corrects_scale: whether the active version is scaled before a layer's embedding is added.

    Raises:
        DescriptionError: they do not fit each other.
    """

    count: int
    active: int
    rank: int
    gate_deviations: tuple[float | None, ...]
    corrects_scale: bool = True

    def __post_init__(self) -> None:
        check_range(self.count, "altup.num_inputs", MAX_VERSIONS, 2)
        check_range(self.active, "altup.active_idx", self.count - 1, 0)


@dataclass(frozen=True)
class Multipliers:
    """Factors on what matrices take and give (Falcon-H1); `mixer_parts` on gates, inputs, keys, queries and steps."""

    attention_in: float = 1.0
    key: float = 1.0
    attention_out: float = 1.0
    gate: float = 1.0
    down: float = 1.0
    mixer_in: float = 1.0
    mixer_parts: tuple[float, ...] = (1.0,) * 5
    mixer_out: float = 1.0

    def __post_init__(self) -> None:
        require(len(self.mixer_parts) == 5, f"ssm_multipliers are {len(self.mixer_parts)} numbers, not 5")
        for field in fields(self):
            for number in self.mixer_parts if field.name == "mixer_parts" else (getattr(self, field.name),):
                _check_number(1 / number if number else math.inf, f"1 / {field.name}")
                _check_number(number, field.name)


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer, where they are not those of all: see `Parameters`. A layer without attention has no heads.

    Without `query_heads`, they are as many as in all layers.

    Raises:
        DescriptionError: one is out of range.
    """

    head_size: int
    kv_heads: int
    inner_size: int
    query_heads: int = 0

    def __post_init__(self) -> None:
        check_range(self.query_heads, "num_attention_heads_per_layer", MAX_SIZE, 0)
        check_range(self.head_size, "attention.key_length, head_dim", MAX_SIZE)
        check_range(self.kv_heads, "attention.head_count_kv, num_key_value_heads", MAX_SIZE, 0)
        check_range(self.inner_size, "feed_forward_length, intermediate_size", MAX_SIZE, 0)


@dataclass(frozen=True, eq=False)
class Parameters:
    """Numbers of a model.

    Attributes:
        num_layers: decoder layers.
        hidden_size: size of the residual stream.
        query_heads: number of query heads in each layer.
        kv_heads: number of KV heads in each layer.
        head_size: size of queries, keys and values.
        context: positions it was trained for.
        ropes: RoPE of each layer, None in a layer without positions.
        tied: whether the output layer is the embedding.
        sliding: window of each layer, None if it sees everything.
        softcap: limit of queries times keys, 0 for none.
        logit_softcap: limit of logits, 0 for none.
        temperature: temperature of queries, and the original model's number of positions; None for none.
        norms_after_rope: norms of queries and keys come after RoPE, so that it cannot be changed later.
        clip: largest magnitude of queries, keys and values, 0 for any.
        value_scale: factor on values.
        value_size: size of values, 0 if it is that of queries and keys.
        gate_size: numbers of a head's gate, 0 if it has one for each number of its output.
        experts: parameters of the experts, in layers that have them.
        latent: sizes of latent keys and values, None if there are none.
        latent_queries: size of latent queries, 0 if there are none.
        latent_epsilon: epsilon of norms of latent vectors, 0 if it is that of all.
        mixer: parameters of recurrent layers that have heads.
        layer_shapes: shape of each layer, if they differ.
        shared_kv_layers: number of last layers that reuse the keys and values of an earlier layer of their type.
        own_embedding: size of the embeddings of tokens in each layer, 0 for none.
        own_vocabulary: for how many tokens there are such, 0 for all.
        unsaid_tokens: number of tokens that can be read, but not said.
        altup: parameters of AltUp, None if there is one residual stream.
        multipliers: factors on matrices.

    Raises:
        DescriptionError: they do not fit each other.
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
    clip: float = 0.0
    value_scale: float = 1.0
    value_size: int = 0
    gate_size: int = 0
    experts: ExpertParameters | None = None
    latent: LatentSizes | None = None
    latent_queries: int = 0
    latent_epsilon: float = 0.0
    mixer: MixerParameters | None = None
    layer_shapes: tuple[LayerShape, ...] = ()
    shared_kv_layers: int = 0
    own_embedding: int = 0
    own_vocabulary: int = 0
    unsaid_tokens: int = 0
    altup: AltUpParameters | None = None
    multipliers: Multipliers = Multipliers()

    def __post_init__(self) -> None:
        layers = self.num_layers
        check_range(layers, "block_count, num_hidden_layers", MAX_LAYERS)
        check_range(self.hidden_size, "embedding_length, hidden_size", MAX_SIZE)
        check_range(self.inner_size, "feed_forward_length, intermediate_size", MAX_SIZE, 0)
        check_range(self.vocabulary, "vocab_size", MAX_SIZE)
        check_range(self.query_heads, "attention.head_count, num_attention_heads", MAX_SIZE)
        check_range(self.context, "context_length, max_position_embeddings", MAX_TOKENS)
        check_range(self.shared_kv_layers, "attention.shared_kv_layers", layers - 1, 0)
        check_range(self.own_embedding, "embedding_length_per_layer_input", MAX_SIZE // layers, 0)
        check_range(self.own_vocabulary, "vocab_size_per_layer_input", MAX_SIZE, 0)
        check_range(self.latent_queries, "attention.q_lora_rank", MAX_SIZE, 0)
        check_range(self.value_size, "v_head_dim", MAX_SIZE // self.query_heads, 0)
        check_range(self.gate_size, "the size of gates", MAX_SIZE // self.query_heads, 0)
        counts = {len(self.ropes), len(self.sliding), len(self.layer_shapes) or layers}
        counts |= {len(self.altup.gate_deviations)} if self.altup else set()
        require(counts == {layers}, f"numbers are not given for {layers} layers (block_count)")
        for name in _FACTORS:
            _check_number(getattr(self, name), name)
        if self.temperature:
            _check_number(self.temperature[0], "attention.temperature_scale")
            check_range(self.temperature[1], "rope.scaling.original_context_length", MAX_TOKENS)
        for number, (rope, window) in enumerate(zip(self.ropes, self.sliding, strict=True)):
            self._check_layer(self.layer_shape(number), rope, window)

    def _check_layer(self, shape: LayerShape, rope: RopeParameters | None, window: int | None) -> None:
        """Check what may differ from layer to layer."""
        size, heads, queries = shape.head_size, shape.kv_heads or 1, shape.query_heads or self.query_heads
        require(queries % heads == 0, f"{queries} query heads do not share {heads} (head_count_kv)")
        check_range(size, "the size of a head", MAX_SIZE // queries)
        if rope:
            limit = self.latent.rope_size if self.latent else size
            rope.check_head(limit)
        if window is not None:
            check_range(window, "sliding_window", MAX_WINDOW if None in self.sliding else MAX_TOKENS)

    def layer_shape(self, layer: int) -> LayerShape:
        """Sizes of a layer."""
        shared = LayerShape(self.head_size, self.kv_heads, self.inner_size)
        return self.layer_shapes[layer] if self.layer_shapes else shared

    def shared_kv_layer(self, layer: int) -> int | None:
        """The layer whose keys and values a layer uses, None if it has its own.

        Raises:
            DescriptionError: there is no such layer.
        """
        first = self.num_layers - self.shared_kv_layers
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
        return name not in _KEYS_AND_VALUES or self.shared_kv_layer(layer) is None

    @property
    def windows(self) -> list[int | None]:
        """The windows of layers that slide while others do not; such layers do not follow the plan of a cache."""
        if None not in self.sliding:
            return [None] * self.num_layers
        return [window and min(window, self.context) for window in self.sliding]

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


def tensor_name(full: str) -> tuple[int | None, str, str]:
    """The layer of a tensor of a GGUF file, its name in it, and what it is of that: ``weight``, ``bias`` or nothing."""
    parts = re.fullmatch(r"(?s)(?:blk\.([0-9]{1,9})\.)?(.*?)(?:\.(weight|bias))?", full)
    assert parts is not None
    return None if parts[1] is None else int(parts[1]), parts[2], parts[3] or ""
