"""Describes what goes into the residual stream, or is done with it, besides attention, mixer and MLP."""

from __future__ import annotations

from typing import Any

from h2o_stream.native import layouts
from h2o_stream.native.altup import AltUp, Laurel, Versions
from h2o_stream.native.attention_modules import AttentionReader
from h2o_stream.native.description import DescriptionError, LayerEmbeddings, OwnEmbedding
from h2o_stream.native.module_reader import has_modules
from h2o_stream.native.modules import activation_of, as_float32, embedding_of, embedding_scale


class ResidualReader(AttentionReader):
    """Reads embeddings of tokens in each layer, AltUp and LAuReL."""

    def _layer_embeddings(self, backbone: Any) -> LayerEmbeddings | None:
        """The embeddings for each layer, if the model has some."""
        layout, name = layouts.OWN_EMBEDDING, "the embeddings of layers"
        embedding = getattr(backbone, layout.embedding, None)
        if embedding is None:
            return None
        self._mark_read(*embedding.modules())
        rows = embedding_of(embedding, name)
        projection = self._matrix(backbone, layout.projection, name)
        size = rows.columns // self._config.num_hidden_layers
        return LayerEmbeddings(
            embedding=rows,
            projection=projection,
            norm=self._norm(backbone, layout.projection_norm, size, name),
            scale=embedding_scale(embedding),
            projection_scale=next(
                float(getattr(backbone, key)) for key in layout.projection_scales if hasattr(backbone, key)
            ),
            output_scale=float(getattr(backbone, layout.output_scale)),
        )

    def _own_embedding(self, layer: Any, name: str, mlp: Any) -> OwnEmbedding:
        layout = layouts.OWN_EMBEDDING
        gate = self._matrix(layer, layout.gate, name)
        out = self._matrix(layer, layout.out, name)
        self._mark_read(layer.act_fn)
        if activation_of(layer.act_fn, f"act_fn of {name}") != (mlp.activation, mlp.parameters):
            raise DescriptionError(f"{name} has another activation than its MLP")
        return OwnEmbedding(gate, out, self._norm(layer, layout.norm, self._hidden, name))

    def _versions(self, backbone: Any) -> Versions | None:
        """The versions of the residual stream, if there are several."""
        layout = layouts.ALTUP
        if not has_modules(backbone, (layout.first, layout.last)):
            return None
        self._mark_read(getattr(backbone, layout.first), getattr(backbone, layout.last))
        first, last = (
            [self._matrix(getattr(backbone, key), str(number), key) for number in range(count)]
            for key, count in ((key, len(getattr(backbone, key))) for key in (layout.first, layout.last))
        )
        return Versions(first, last, int(self._config.altup_active_idx))

    def _altup(self, layer: Any, versions: Versions | None, name: str) -> AltUp | None:
        layout = layouts.ALTUP
        if versions is None:
            return None
        module, name = getattr(layer, layout.module), f"{layout.module} of {name}"
        self._mark_container(module, name, layout.embedding_scale, layout.input_scale)
        self._mark_read(getattr(module, layout.router))
        norm = self._norm(module, layout.norm, self._hidden, name)
        router, prediction, correction = (
            self._small(module, key, name) for key in (layout.router, layout.prediction, layout.correction)
        )
        if norm.weight is None:
            raise DescriptionError(f"{name} has no {layout.norm}")
        scaled = self._config.altup_correct_scale
        return AltUp(
            (router * norm.weight * float(getattr(module, layout.input_scale))).contiguous(),
            norm.epsilon,
            prediction,
            correction,
            as_float32(getattr(module, layout.embedding_scale), name) if scaled else None,
        )

    def _small(self, module: Any, key: str, name: str) -> Any:
        """The weights of a small linear layer, in float32."""
        self._matrix(module, key, name)
        return as_float32(getattr(module, key).weight, name)

    def _laurel(self, layer: Any, name: str) -> Laurel | None:
        layout = layouts.LAUREL
        if not has_modules(layer, (layout.module,)):
            return None
        module, name = getattr(layer, layout.module), f"{layout.module} of {name}"
        self._mark_container(module, name)
        left = self._matrix(module, layout.left, name)
        right = self._matrix(module, layout.right, name)
        return Laurel(left, right, self._norm(module, layout.norm, self._hidden, name), layout.scale)
