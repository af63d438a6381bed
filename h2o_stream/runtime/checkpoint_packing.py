"""Packs the matrices of a checkpoint into 8 or 4 bits, as `models.quantize` does."""

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
from h2o_stream.native.packing import columns_fit, pack, packed_bytes, tiles_shape
from h2o_stream.runtime.packed_file import Entry
from h2o_stream.runtime.rotations import Floats
from h2o_stream.runtime.weights import SAFETENSORS_DTYPES, CheckpointWeights, Weights

KINDS = {"int8": MatrixKind.INT8, "int4": MatrixKind.INT4}


class PackedCheckpoint(Weights):
    """The weights of a checkpoint, of which matrices are packed as they are asked for; see `runtime.weights.Weights`.

    Embedding and output layer have 8 bits. What is packed is as in the file, also if the model has another dtype.
    `progress` gets the numbers packed.
    """

    def __init__(self, weights: CheckpointWeights, quantize: str, progress: ProgressCallback) -> None:
        self._weights, self._progress = weights, progress
        self._kinds = packed_kinds(weights, quantize)
        self._sizes = {
            module: packed_bytes(kind, *weights.arrays[f"{module}.weight"].shape)
            for module, kind in self._kinds.items()
        }
        self._pages: HugePages | None = None
        self._done, self._total = 0, sum(weights.arrays[f"{module}.weight"].size for module in self._kinds)

    def matrix(self, name: str, layer: int | None, rows: int, columns: int) -> Matrix:
        """A linear layer or, outside of layers, the embedding or the output layer; with its bias if it has one."""
        module = self._weights.module_name(name, layer)
        kind = self._kinds.get(module)
        if kind is None:
            return self._weights.matrix(name, layer, rows, columns)
        self._weights.stored(name, layer, rows, columns)
        if self._pages is None:
            self._pages = HugePages(sum(HugePages.aligned(size) for size in self._sizes.values()))
        tiles = self._pages.take(self._sizes[module]).reshape(tiles_shape(kind, rows, columns))
        self._pack(module, tiles)
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
        return sum(self._sizes.values())

    def entries(self) -> Iterator[Entry]:
        """All tensors, for a folder of packed weights."""
        for name, array in self._weights.arrays.items():
            module = name.removesuffix(".weight")
            kind = self._kinds.get(module) if module != name else None
            if kind is None:
                dtype = SAFETENSORS_DTYPES[array.dtype.type]
                yield Entry(name, dtype, array.shape, array.nbytes, partial(_copy, array))
            else:
                yield Entry.packed(module, kind, tiles_shape(kind, *array.shape), partial(self._pack, module))

    def _pack(self, module: str, tiles: NDArray[numpy.uint8]) -> None:
        stored = self._weights.arrays[f"{module}.weight"]
        pack(stored, self._kinds[module], tiles)
        self._done += stored.size
        self._progress(Progress("packing", self._done, self._total))


def packed_kinds(weights: CheckpointWeights, quantize: str) -> dict[str, MatrixKind]:
    """Packed formats by module name: linear layers and the embedding, if their columns are a multiple of 32."""
    kinds = {}
    for name, layer in weights.matrices():
        module = weights.module_name(name, layer)
        kind = MatrixKind.INT8 if layer is None else KINDS[quantize]
        if columns_fit(kind, weights.arrays[f"{module}.weight"].shape[1]):
            kinds[module] = kind
    return kinds


def packed_size(weights: CheckpointWeights, quantize: str, itemsize: int) -> int:
    """Bytes of the weights after packing, including `itemsize` for each number that is not packed."""
    kinds = packed_kinds(weights, quantize)
    shapes = {module: weights.arrays[f"{module}.weight"].shape for module in kinds}
    rest = weights.num_weights - sum(map(math.prod, shapes.values()))
    return itemsize * rest + sum(packed_bytes(kind, *shapes[module]) for module, kind in kinds.items())


def _copy(array: NDArray[Any], out: NDArray[numpy.uint8]) -> None:
    out[:] = array.reshape(-1).view(numpy.uint8)
