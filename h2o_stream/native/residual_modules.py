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
        projection = self._matrix(backbone, layout.projection, name, self._hidden)
        size, rest = divmod(rows.columns, self._config.num_hidden_layers)
        if rest or projection.rows != rows.columns or projection.bias is not None:
            raise DescriptionError(f"{name} have {rows.columns} columns, their projection {projection.rows} rows")
        return LayerEmbeddings(
            embedding=rows,
            projection=projection,
            norm=self._norm(backbone, layout.projection_norm, size, name),
            scale=embedding_scale(embedding, rows, name),
            projection_scale=next(
                float(getattr(backbone, key)) for key in layout.projection_scales if hasattr(backbone, key)
            ),
            output_scale=float(getattr(backbone, layout.output_scale)),
        )

    def _own_embedding(self, layer: Any, name: str, mlp: Any, embeddings: LayerEmbeddings) -> OwnEmbedding:
        layout = layouts.OWN_EMBEDDING
        gate = self._matrix(layer, layout.gate, name, self._hidden)
        out = self._matrix(layer, layout.out, name, gate.rows)
        self._check_rows(out, f"{layout.out} of {name}")
        if gate.rows * self._config.num_hidden_layers != embeddings.embedding.columns:
            raise DescriptionError(f"{layout.gate} of {name} gives {gate.rows} outputs")
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
            [self._matrix(getattr(backbone, key), str(number), key, self._hidden) for number in range(count)]
            for key, count in ((key, len(getattr(backbone, key))) for key in (layout.first, layout.last))
        )
        for matrix in (*first, *last):
            self._check_rows(matrix, "a projection to a version of the residual stream")
        return Versions(first, last, int(self._config.altup_active_idx))

    def _altup(self, layer: Any, versions: Versions | None, name: str) -> AltUp | None:
        layout = layouts.ALTUP
        if versions is None:
            return None
        module, count, name = getattr(layer, layout.module), 1 + len(versions.first), f"{layout.module} of {name}"
        self._mark_container(module, name, layout.embedding_scale, layout.input_scale)
        self._mark_read(getattr(module, layout.router))
        norm = self._norm(module, layout.norm, self._hidden, name)
        router, prediction, correction = (
            self._small(module, key, rows, columns, name)
            for key, rows, columns in (
                (layout.router, count, self._hidden),
                (layout.prediction, count**2, count),
                (layout.correction, count, count),
            )
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

    def _small(self, module: Any, key: str, rows: int, columns: int, name: str) -> Any:
        """The weights [rows, columns] of a small linear layer, in float32."""
        matrix = self._matrix(module, key, name, columns)
        if matrix.rows != rows or matrix.bias is not None:
            raise DescriptionError(f"{key} of {name} gives {matrix.rows} outputs, or has a bias")
        return as_float32(getattr(module, key).weight, name)

    def _laurel(self, layer: Any, name: str) -> Laurel | None:
        layout = layouts.LAUREL
        if not has_modules(layer, (layout.module,)):
            return None
        module, name = getattr(layer, layout.module), f"{layout.module} of {name}"
        self._mark_container(module, name)
        left = self._matrix(module, layout.left, name, self._hidden)
        right = self._matrix(module, layout.right, name, left.rows)
        self._check_rows(right, f"{layout.right} of {name}")
        return Laurel(left, right, self._norm(module, layout.norm, self._hidden, name), layout.scale)
