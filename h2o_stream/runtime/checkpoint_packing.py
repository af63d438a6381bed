"""Packs the matrices of a checkpoint into 8 or 4 bits, as `models.quantize` does those of a model of transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream.base.progress import Progress, ProgressCallback
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.description import DescriptionError, Matrix
from h2o_stream.native.packing import ROWS, columns_fit, pack, packed_bytes
from h2o_stream.runtime.packed_file import PackedMatrix, PackedWeights
from h2o_stream.runtime.rotations import Floats
from h2o_stream.runtime.weights import CheckpointWeights, StoredMatrix

KINDS = {"int8": MatrixKind.INT8, "int4": MatrixKind.INT4}


class PackedCheckpoint(PackedWeights):
    """The weights of a checkpoint, of which matrices are packed as they are asked for; see `runtime.weights.Weights`.

    Embedding and output layer have 8 bits. What is packed is as in the file, also if the model has another dtype.
    `progress` gets the numbers packed.
    """

    def __init__(self, weights: CheckpointWeights, quantize: str, progress: ProgressCallback) -> None:
        self._weights, self._progress = weights, progress
        self.packed = {matrix.module: (matrix, kind) for matrix, kind in packed_matrices(weights, quantize)}
        self._done, self._total = 0, sum(math.prod(matrix.shape) for matrix, _ in self.packed.values())

    def matrix(self, name: str, layer: int | None, rows: int, columns: int) -> Matrix:
        """A linear layer or, outside of layers, the embedding or the output layer; with its bias if it has one."""
        module = self._weights.module_name(name, layer)
        if module not in self.packed:
            return self._weights.matrix(name, layer, rows, columns)
        packed = self._entry(*self.packed[module])
        if (packed.rows, packed.columns) != (rows, columns):
            raise DescriptionError(f"its {module}.weight is {(packed.rows, packed.columns)}, not {(rows, columns)}")
        return Matrix(self.tiles_of(packed), self._weights.vector(name, layer, "bias"), rows, columns, packed.kind)

    def vector(self, name: str, layer: int | None, kind: str = "weight") -> Floats | None:
        """The weights of a norm, or with ``bias`` its biases, [n] float32; None if there are none."""
        return self._weights.vector(name, layer, kind)

    def has(self, name: str, layer: int) -> bool:
        """Whether the layer has this weight."""
        return self._weights.has(name, layer)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrices."""
        return sum(packed_bytes(kind, *matrix.shape) for matrix, kind in self.packed.values())

    def entries(self) -> Iterator[PackedMatrix]:
        """See `PackedWeights`."""
        by_array = {matrix.arrays[0]: (matrix, kind) for matrix, kind in self.packed.values()}
        yield from (self._entry(*by_array[name]) for name in self._weights.arrays if name in by_array)

    def _entry(self, matrix: StoredMatrix, kind: MatrixKind) -> PackedMatrix:
        return PackedMatrix(f"{matrix.module}.tiles", kind, *matrix.shape, partial(self._pack, matrix, kind))

    def unpacked(self) -> dict[str, NDArray[Any]]:
        """All other arrays of the files, by name."""
        packed = {name for matrix, _ in self.packed.values() for name in matrix.arrays}
        return {name: array for name, array in self._weights.arrays.items() if name not in packed}

    def _pack(self, matrix: StoredMatrix, kind: MatrixKind, tiles: NDArray[numpy.uint8]) -> None:
        stored = self._weights.stored(matrix.name, matrix.layer, *matrix.shape)
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
