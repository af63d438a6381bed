"""Numbers that describe a decoder-only transformer besides its weights, whatever file they are from."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from h2o_stream.native.abi import GroupWorth, NormKind, Scoring
from h2o_stream.native.description import DescriptionError
from h2o_stream.native.latent import LatentSizes
from h2o_stream.runtime.file_altup import AltUpParameters
from h2o_stream.runtime.file_ropes import RopeParameters


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


def tensor_name(full: str) -> tuple[int | None, str, str]:
    """The layer of a tensor of a GGUF file, its name in it, and what it is of that: ``weight``, ``bias`` or nothing."""
    parts = re.fullmatch(r"(?:blk\.(\d+)\.)?(.+?)(?:\.(weight|bias))?", full)
    assert parts is not None
    return None if parts[1] is None else int(parts[1]), parts[2], parts[3] or ""
