"""Describes what goes into the residual stream, or is done with it, besides attention, mixer and MLP."""

from __future__ import annotations

from typing import Any

from h2o_stream.native import layouts
from h2o_stream.native.altup import AltUp, Laurel, Versions
from h2o_stream.native.attention_modules import AttentionReader
from h2o_stream.native.description import DescriptionError, LayerEmbeddings, OwnEmbedding
from h2o_stream.native.module_reader import has_modules
from h2o_stream.native.modules import activation_of, embedding_scale
from h2o_stream.native.torch_modules import as_float32, embedding_of


class ResidualReader(AttentionReader):
    """Reads embeddings of tokens in each layer, AltUp and LAuReL."""

    def _layer_embeddings(self, backbone: Any) -> LayerEmbeddings | None:
        """The embeddings for each layer, if the model has some."""
        name = "the embeddings of layers"
        embedding = getattr(backbone, "embed_tokens_per_layer", None)
        if embedding is None:
            return None
        self._mark_read(*embedding.modules())
        rows = embedding_of(embedding, name)
        projection = self._matrix(backbone, "per_layer_model_projection", name)
        size = rows.columns // self._config.num_hidden_layers
        return LayerEmbeddings(
            embedding=rows,
            projection=projection,
            norm=self._norm(backbone, "per_layer_projection_norm", size, name),
            scale=embedding_scale(embedding),
            projection_scale=next(
                float(getattr(backbone, key)) for key in layouts.OWN_EMBEDDING_SCALES if hasattr(backbone, key)
            ),
            output_scale=float(getattr(backbone, layouts.OWN_EMBEDDING_OUTPUT_SCALE)),
        )

    def _own_embedding(self, layer: Any, name: str, mlp: Any) -> OwnEmbedding:
        gate, out = (self._matrix(layer, key, name) for key in layouts.OWN_EMBEDDING[:2])
        self._mark_read(layer.act_fn)
        if activation_of(layer.act_fn, f"act_fn of {name}") != (mlp.activation, mlp.parameters):
            raise DescriptionError(f"{name} has another activation than its MLP")
        return OwnEmbedding(gate, out, self._norm(layer, layouts.OWN_EMBEDDING[2], self._hidden, name))

    def _versions(self, backbone: Any) -> Versions | None:
        """The versions of the residual stream, if there are several."""
        keys = "altup_projections", "altup_unembed_projections"
        if not has_modules(backbone, keys):
            return None
        lists = [getattr(backbone, key) for key in keys]
        self._mark_read(*lists)
        first, last = (
            [self._matrix(each, str(number), key) for number in range(len(each))]
            for key, each in zip(keys, lists, strict=True)
        )
        return Versions(first, last, int(self._config.altup_active_idx))

    def _altup(self, layer: Any, versions: Versions | None, name: str) -> AltUp | None:
        if versions is None:
            return None
        module, name = getattr(layer, layouts.ALTUP), f"{layouts.ALTUP} of {name}"
        self._mark_container(module, name, "correct_output_scale", "router_input_scale")
        self._mark_read(module.modality_router)
        norm = self._norm(module, "router_norm", self._hidden, name)
        router, prediction, correction = (
            self._small(module, key, name) for key in ("modality_router", "prediction_coefs", "correction_coefs")
        )
        if norm.weight is None:
            raise DescriptionError(f"{name} has no router_norm")
        scaled = self._config.altup_correct_scale
        return AltUp(
            (router * norm.weight * float(module.router_input_scale)).contiguous(),
            norm.epsilon,
            prediction,
            correction,
            as_float32(module.correct_output_scale, name) if scaled else None,
        )

    def _small(self, module: Any, key: str, name: str) -> Any:
        """The weights of a small linear layer, in float32."""
        self._matrix(module, key, name)
        return as_float32(getattr(module, key).weight, name)

    def _laurel(self, layer: Any, name: str) -> Laurel | None:
        if not has_modules(layer, (layouts.LAUREL,)):
            return None
        module, name = getattr(layer, layouts.LAUREL), f"{layouts.LAUREL} of {name}"
        self._mark_container(module, name)
        left, right = (self._matrix(module, key, name) for key in ("linear_left", "linear_right"))
        return Laurel(left, right, self._norm(module, "post_laurel_norm", self._hidden, name))
