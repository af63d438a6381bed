"""Packs the matrices of a checkpoint into 8 or 4 bits, as `models.quantize` does those of a model of transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream.base.progress import Progress, ProgressCallback
from h2o_stream.models.pages import HugePages
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.description import Matrix
from h2o_stream.native.packing import ROWS, columns_fit, pack, packed_bytes, tiles_shape
from h2o_stream.runtime.packed_file import Entry
from h2o_stream.runtime.rotations import Floats
from h2o_stream.runtime.safetensors_files import SAFETENSORS_DTYPES
from h2o_stream.runtime.weights import CheckpointWeights, StoredMatrix, Weights

KINDS = {"int8": MatrixKind.INT8, "int4": MatrixKind.INT4}


class PackedCheckpoint(Weights):
    """The weights of a checkpoint, of which matrices are packed as they are asked for; see `runtime.weights.Weights`.

    Embedding and output layer have 8 bits. What is packed is as in the file, also if the model has another dtype.
    `progress` gets the numbers packed.
    """

    def __init__(self, weights: CheckpointWeights, quantize: str, progress: ProgressCallback) -> None:
        self._weights, self._progress = weights, progress
        self._packed = {matrix.module: (matrix, kind) for matrix, kind in packed_matrices(weights, quantize)}
        self._pages: HugePages | None = None
        self._done, self._total = 0, sum(math.prod(matrix.shape) for matrix, _ in self._packed.values())

    def matrix(self, name: str, layer: int | None, rows: int, columns: int) -> Matrix:
        """A linear layer or, outside of layers, the embedding or the output layer; with its bias if it has one."""
        found = self._packed.get(self._weights.module_name(name, layer))
        if found is None:
            return self._weights.matrix(name, layer, rows, columns)
        if self._pages is None:
            sizes = (packed_bytes(kind, *matrix.shape) for matrix, kind in self._packed.values())
            self._pages = HugePages(sum(map(HugePages.aligned, sizes)))
        stored, kind = self._weights.stored(name, layer, rows, columns), found[1]
        tiles = self._pages.take(packed_bytes(kind, rows, columns)).reshape(tiles_shape(kind, rows, columns))
        self._pack(stored, kind, tiles)
        return Matrix(tiles, self._weights.vector(name, layer, "bias"), rows, columns, kind)

    def vector(self, name: str, layer: int | None, kind: str = "weight") -> Floats | None:
        """The weights of a norm, or with ``bias`` its biases, [n] float32; None if there are none."""
        return self._weights.vector(name, layer, kind)

    def has(self, name: str, layer: int) -> bool:
        """Whether the layer has this weight."""
        return self._weights.has(name, layer)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrices."""
        return sum(packed_bytes(kind, *matrix.shape) for matrix, kind in self._packed.values())

    def entries(self) -> Iterator[Entry]:
        """All tensors, for a folder of packed weights."""
        packed = {name: found for found in self._packed.values() for name in found[0].arrays}
        for name, array in self._weights.arrays.items():
            if name not in packed:
                dtype = SAFETENSORS_DTYPES[array.dtype.type]
                yield Entry(name, dtype, array.shape, array.nbytes, partial(_copy, array))
                continue
            matrix, kind = packed[name]
            if name == matrix.arrays[0]:
                fill = partial(self._pack_stored, matrix, kind)
                yield Entry.packed(matrix.module, kind, tiles_shape(kind, *matrix.shape), fill)

    def _pack_stored(self, matrix: StoredMatrix, kind: MatrixKind, tiles: NDArray[numpy.uint8]) -> None:
        self._pack(self._weights.stored(matrix.name, matrix.layer, *matrix.shape), kind, tiles)

    def _pack(self, stored: NDArray[Any], kind: MatrixKind, tiles: NDArray[numpy.uint8]) -> None:
        pack(stored, kind, tiles)
        self._done += stored.size
        self._progress(Progress("packing", self._done, self._total))


def packed_matrices(weights: CheckpointWeights, quantize: str) -> Iterator[tuple[StoredMatrix, MatrixKind]]:
    """What is packed, and in which format: if its columns are a multiple of 32, and experts are of whole tiles."""
    for matrix in weights.matrices():
        kind = MatrixKind.INT8 if matrix.layer is None else KINDS[quantize]
        if columns_fit(kind, matrix.columns) and (matrix.count == 1 or matrix.rows % ROWS == 0):
            yield matrix, kind


def packed_size(weights: CheckpointWeights, quantize: str, itemsize: int) -> int:
    """Bytes of the weights after packing, including `itemsize` for each number that is not packed."""
    size = itemsize * weights.num_weights
    for matrix, kind in packed_matrices(weights, quantize):
        size += packed_bytes(kind, *matrix.shape) - itemsize * math.prod(matrix.shape)
    return size


def _copy(array: NDArray[Any], out: NDArray[numpy.uint8]) -> None:
    out[:] = array.reshape(-1).view(numpy.uint8)
