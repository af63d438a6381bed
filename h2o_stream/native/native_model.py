"""A description as the C structures of `src/abi.h`."""

from __future__ import annotations

from copy import copy

from h2o_stream.native import abi
from h2o_stream.native.altup import fill_versions
from h2o_stream.native.description import Description
from h2o_stream.native.pointers import pointer


class NativeModel:
    """A description as C structures, with the arrays they point to.

    The fields that depend on a cache are still zero: those of `AttentionLayer` from `policy` on, and the slot groups.

    Attributes:
        layers: array of `abi.Layer`.
        description: keeps the arrays alive.
    """

    _original: NativeModel | None = None

    def __init__(self, description: Description) -> None:
        self.description = description
        self.layers = (abi.Layer * len(description.layers))()
        states = 0
        for number, (layer, struct) in enumerate(zip(description.layers, self.layers, strict=True)):
            layer.fill(struct, description.embedding.columns, states)
            states += len(layer.mixer.states) if layer.mixer else 0
            source = layer.attention.source if layer.attention else None
            struct.kv_source = number if source is None else source
        self.struct = abi.Model(
            layers=self.layers,  # a cast would refer to itself
            layer_count=len(self.layers),
            hidden_size=description.embedding.columns,
            vocab_size=description.output.rows,
            embedding=description.embedding.to_struct(),
            embedding_scale=description.embedding_scale,
            learned_positions=pointer(description.learned_positions, "float32", description.embedding.columns),
            learned_offset=description.learned_offset,
            embedding_norm=description.embedding_norm.to_struct(description.embedding.columns),
            norm=description.norm.to_struct(description.embedding.columns),
            output=description.output.to_struct(),
            logit_scale=description.logit_scale,
            logit_softcap=description.logit_softcap,
            residual_scale=description.residual_scale,
        )
        if description.versions:
            fill_versions(description.versions, self.struct)
        if embeddings := description.layer_embeddings:
            struct, size = self.struct, embeddings.embedding.columns // len(self.layers)
            struct.layer_embedding, struct.layer_projection = (
                embeddings.embedding.to_struct(),
                embeddings.projection.to_struct(),
            )
            struct.layer_projection_norm = embeddings.norm.to_struct(size)
            struct.layer_embedding_scale, struct.layer_input_scale = embeddings.scale, embeddings.output_scale
            struct.layer_projection_scale = embeddings.projection_scale

    def copied(self) -> NativeModel:
        """A copy for another cache, which is made sooner and smaller than from the description."""
        other = copy(self)
        other._original = self  # keeps alive what the structures point to
        other.layers = type(self.layers).from_buffer_copy(self.layers)
        other.struct = abi.Model.from_buffer_copy(self.struct)
        other.struct.layers = other.layers
        return other
