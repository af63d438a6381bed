"""A decoder-only transformer as data: its matrices, norms and parameters, in the terms of `src/abi.h`.

A description is independent of any cache. `runtime.describe` makes one of parameters and weights; `NativeModel`
converts it to C structures. Its arrays may be tensors of torch or arrays of numpy; nothing here imports torch. Parts
whose sizes do not fit each other raise DescriptionError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from h2o_stream.native import abi
from h2o_stream.native.abi import Activation
from h2o_stream.native.altup import AltUp, Laurel, Versions, fill_altup, fill_laurel
from h2o_stream.native.attention import Attention
from h2o_stream.native.matrix import DENSE as DENSE
from h2o_stream.native.matrix import NO_NORM, require
from h2o_stream.native.matrix import DescriptionError as DescriptionError
from h2o_stream.native.matrix import Matrix as Matrix
from h2o_stream.native.matrix import Norm as Norm
from h2o_stream.native.mixers import Mixer, check_mixer, fill_mixer
from h2o_stream.native.pointers import Array

NORM_ROLES = ("before_attention", "after_attention", "before_mlp", "after_mlp")
"""The norms of a layer."""

OTHER_SENSES = {
    "vision_tower", "audio_tower", "multi_modal_projector", "vision_embed_tokens", "embed_tokens_extend",
    "embed_vision", "embed_audio", "vision_model", "vision_embedder", "audio_embedder",
}  # fmt: skip
"""Modules of models that take images or sounds, too, which tokens of text do not go through."""


class FeedForward(Protocol):
    """What follows attention and mixer in a layer: an `Mlp` or `experts.Experts`."""

    @property
    def matrices(self) -> list[Matrix]:
        """All matrices of some size."""

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a decode step reads."""

    @property
    def hidden(self) -> int:
        """Numbers that it takes and gives."""

    def fill(self, struct: abi.Layer) -> None:
        """Fill the structure of a layer."""


@dataclass(frozen=True, eq=False)
class Mlp:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate.

    Attributes:
        parameters: parameters of the activation, see `abi.h`.
        inner_norm: norm of the input of `down`.
        gate_deviations: only what is above the gates' mean by so many standard deviations goes on; None for all.
    """

    gate: Matrix | None
    up: Matrix
    down: Matrix
    activation: Activation
    parameters: tuple[float, ...] = ()
    inner_norm: Norm = NO_NORM
    gate_deviations: float | None = None

    def __post_init__(self) -> None:
        inner = self.up.rows
        self.down.check_shape(self.hidden, inner, "the last matrix of an MLP")
        if self.gate:
            self.gate.check_shape(inner, self.hidden, "the gates of an MLP")
        require(self.gate is not None or self.gate_deviations is None, "an MLP without gates leaves some of them out")
        self.inner_norm.check_size(inner, "the norm in an MLP")

    @property
    def hidden(self) -> int:
        """Size of the vectors that it takes and gives."""
        return self.up.columns

    @property
    def matrices(self) -> list[Matrix]:
        """All matrices of some size."""
        return [*([self.gate] if self.gate else []), self.up, self.down]

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a decode step reads."""
        return sum(matrix.weights.nbytes for matrix in self.matrices)

    def fill(self, struct: abi.Layer) -> None:
        """Fill the structure of a layer."""
        struct.up, struct.down, struct.activation = self.up.to_struct(), self.down.to_struct(), self.activation
        struct.activation_parameters[: len(self.parameters)] = self.parameters
        struct.inner_norm = self.inner_norm.to_struct(self.down.columns)
        if self.gate:
            struct.gate = self.gate.to_struct()
        if self.gate_deviations is not None:
            struct.cuts_gates, struct.gate_deviations = True, self.gate_deviations


@dataclass(frozen=True, eq=False)
class OwnEmbedding:
    """What a layer adds for the token's embedding for it, see `LayerEmbeddings`: out(activation(gate(x)) * embedding).

    Attributes:
        gate: [size, hidden]; its activation is that of the MLP.
    """

    gate: Matrix
    out: Matrix
    norm: Norm

    def __post_init__(self) -> None:
        self.out.check_shape(self.gate.columns, self.gate.rows, "the projection of a layer's embedding")
        self.norm.check_size(self.out.rows, "the norm of a layer's embedding")


@dataclass(frozen=True, eq=False)
class Layer:
    """A decoder layer: attention or a recurrent mixer, or both, whose outputs are added; then an MLP.

    Any of them may be missing. With `parallel` the MLP reads the attention's input.

    Attributes:
        own_embedding: what is added after the MLP.
        altup: how it updates the versions of the residual stream, if there are several.
        laurel: a residual beside attention.
        output_scale: factor on what the layer gives.
    """

    attention: Attention | None
    mlp: FeedForward | None
    before_attention: Norm
    after_attention: Norm
    before_mlp: Norm
    after_mlp: Norm
    parallel: bool
    mixer: Mixer | None = None
    own_embedding: OwnEmbedding | None = None
    output_scale: float = 1.0
    altup: AltUp | None = None
    laurel: Laurel | None = None

    def __post_init__(self) -> None:
        if self.attention is None and self.mixer is None and self.mlp is None:
            raise DescriptionError("a layer computes nothing")

    @property
    def matrices(self) -> list[Matrix]:
        """All matrices of the layer."""
        return [*self._mixing_matrices, *(self.mlp.matrices if self.mlp else [])]

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a decode step reads."""
        mixing: int = sum(matrix.weights.nbytes for matrix in self._mixing_matrices)
        return mixing + (self.mlp.nbytes if self.mlp else 0)

    @property
    def _mixing_matrices(self) -> list[Matrix]:
        own, mixer = self.own_embedding, self.mixer
        attention = self.attention.matrices if self.attention else []
        mixing = [*mixer.projections, mixer.out] if mixer else []
        laurel = [self.laurel.left, self.laurel.right] if self.laurel else []
        return [*attention, *mixing, *laurel, *([own.gate, own.out] if own else [])]

    def check_sizes(self, hidden: int, versions: int) -> None:
        """Raise DescriptionError if a part is not of a residual stream of so many numbers."""
        if self.attention:
            self.attention.check_hidden(hidden)
        if self.mixer:
            check_mixer(self.mixer, hidden)
        own, laurel = self.own_embedding, self.laurel
        parts = [self.mlp and self.mlp.hidden, own and own.out.rows, laurel and laurel.left.columns]
        for size in parts:
            require(size in (None, hidden), f"a part of a layer takes {size} numbers, not {hidden}")
        for name in NORM_ROLES:
            getattr(self, name).check_size(hidden, f"the norm {name}")
        require((self.altup is not None) == bool(versions), "not all layers update versions of the residual stream")
        if self.altup:
            require(self.own_embedding is not None, "a layer with versions of the residual stream has no embedding")
            self.altup.check_sizes(hidden, versions)

    def fill(self, struct: abi.Layer, hidden: int, first_state: int) -> None:
        """Fill a structure, but for fields that depend on a cache; earlier layers' mixers have `first_state` states."""
        for name in NORM_ROLES:
            setattr(struct, name, getattr(self, name).to_struct(hidden))
        struct.parallel, struct.output_scale = self.parallel, self.output_scale
        if self.attention:
            self.attention.fill(struct)
        if self.mixer:
            fill_mixer(self.mixer, struct.mixer, first_state)
        if self.mlp:
            self.mlp.fill(struct)
        if own := self.own_embedding:
            struct.embedding_gate, struct.embedding_out = own.gate.to_struct(), own.out.to_struct()
            struct.after_embedding = own.norm.to_struct(own.out.rows)
        if self.altup:
            fill_altup(self.altup, struct.altup, hidden)
        if self.laurel:
            fill_laurel(self.laurel, struct.laurel)


@dataclass(frozen=True, eq=False)
class LayerEmbeddings:
    """Embeddings of tokens for each layer, beside those that go into the first one.

    That of a token whose embedding is x is (scale * its row + norm(projection(x) * projection_scale)) * output_scale,
    normed for each layer.

    Attributes:
        embedding: [vocabulary, layers * size].
        projection: [layers * size, hidden].
        norm: norm of `size` elements.
    """

    embedding: Matrix
    projection: Matrix
    norm: Norm
    scale: float
    projection_scale: float
    output_scale: float


@dataclass(frozen=True, eq=False)
class Description:
    """A causal language model.

    Attributes:
        embedding: [vocabulary, hidden].
        learned_positions: [n, hidden] float32, or None.
        learned_offset: row for token index 0.
        embedding_norm: norm of what goes into the first layer.
        logit_softcap: softcap of logits, 0 for none.
        residual_scale: factor on attention and MLP outputs.
        dtype: dtype of the model's activations, such as "bfloat16"; those of a step are float32.
        logits_dtype: dtype of the model's logits.
        placeholders: tokens that stand for something else than text, which the model itself has to take.

    Raises:
        DescriptionError: sizes do not fit, or no layer attends.
    """

    layers: Sequence[Layer]
    embedding: Matrix
    embedding_scale: float
    learned_positions: Array | None
    learned_offset: int
    norm: Norm
    output: Matrix
    logit_scale: float
    logit_softcap: float
    residual_scale: float
    dtype: str
    logits_dtype: str
    embedding_norm: Norm = NO_NORM
    layer_embeddings: LayerEmbeddings | None = None
    versions: Versions | None = None
    placeholders: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        hidden, versions = self.embedding.columns, self.versions
        self.output.check_shape(self.output.rows, hidden, "the output layer")
        tokens = self.embedding.rows
        require(tokens >= self.output.rows, f"{self.output.rows} tokens can be said, and {tokens} can be read")
        require(any(layer.attention for layer in self.layers), "no layer attends")
        self.embedding_norm.check_size(hidden, "the norm of embeddings")
        self.norm.check_size(hidden, "the last norm")
        for matrix in [*versions.first, *versions.last] if versions else []:
            matrix.check_shape(hidden, hidden, "a projection between versions of the residual stream")
        for number, layer in enumerate(self.layers):
            layer.check_sizes(hidden, 1 + len(versions.first) if versions else 0)
            self._check_layer(number, layer)
        if embeddings := self.layer_embeddings:
            columns = embeddings.embedding.columns
            embeddings.norm.check_size(columns // len(self.layers), "the norm of layers' embeddings")
            embeddings.projection.check_shape(columns, hidden, "the projection to layers' embeddings")

    def _check_layer(self, number: int, layer: Layer) -> None:
        """Check what a layer takes from the model or from an earlier layer."""
        if layer.own_embedding:
            size, columns = layer.own_embedding.gate.rows, 0
            if self.layer_embeddings:
                columns = self.layer_embeddings.embedding.columns
            require(columns == size * len(self.layers), f"layers' embeddings are {columns} numbers, not {size} of each")
        if layer.attention is None or (source := layer.attention.source) is None:
            return
        lender = self.layers[source].attention if 0 <= source < number else None
        fits = (
            lender is not None
            and lender.source is None
            and all(
                getattr(lender, name) == getattr(layer.attention, name)
                for name in ("kv_heads", "head_size", "value_size")
            )
        )
        require(fits, f"layer {number} does not fit the keys of layer {source}")

    @property
    def supports_absolute(self) -> bool:
        """Whether ``absolute`` positions work: nothing but angles depends on positions."""
        ropes = (layer.attention.rope for layer in self.layers if layer.attention)
        return all(rope is None or rope.fixed for rope in ropes)

    @property
    def matrices(self) -> list[Matrix]:
        """All matrices that a decode step multiplies, or of which it multiplies some experts; without routers."""
        embeddings = [self.layer_embeddings.projection] if self.layer_embeddings else []
        versions = [*self.versions.first, *self.versions.last] if self.versions else []
        return [self.output, *embeddings, *versions, *(matrix for layer in self.layers for matrix in layer.matrices)]

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a decode step reads."""
        return sum((layer.nbytes for layer in self.layers), int(self.output.weights.nbytes))
