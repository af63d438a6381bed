"""Weights by llama.cpp's names, from a GGUF file or from a folder of packed weights; everything stays mapped or packed.

Vectors are float32 arrays that hold what the model's dtype can hold, as when transformers loads them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy
from numpy.typing import NDArray

from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.gguf_header import GgufTensor
from h2o_stream.models.pages import HugePages, map_weights
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.description import DescriptionError, Matrix
from h2o_stream.native.packing import GGUF_KINDS, columns_fit, repack, tiles_shape
from h2o_stream.progress import Progress, ProgressCallback
from h2o_stream.runtime.architectures import Architecture
from h2o_stream.runtime.parameters import Parameters
from h2o_stream.runtime.rotations import Floats


class Weights(Protocol):
    """The weights of a model."""

    def matrix(self, name: str, layer: int | None, rows: int, columns: int) -> Matrix:
        """A linear layer or, outside of layers, the embedding or the output layer; with its bias if it has one.

        The matrices of all experts are one, those of the next expert below.

        Raises:
            DescriptionError: it is missing, not packed, or of another shape.
        """

    def vector(self, name: str, layer: int | None, kind: str = "weight") -> Floats | None:
        """The weights of a norm, or with ``bias`` its biases, [n] float32; None if there are none.

        Small matrices that are not packed are vectors, too.
        """

    def has(self, name: str, layer: int) -> bool:
        """Whether there is such a matrix."""


def rounded(numbers: Floats, dtype: str) -> Floats:
    """Numbers as `dtype` holds them, ``float32`` or ``bfloat16``, in float32."""
    if dtype == "float32":
        return numbers
    bits = numbers.view(numpy.uint32)
    half = ((bits >> 16) & 1) + 0x7FFF  # rounds to nearest, ties to even
    return ((bits + half) & 0xFFFF0000).view(numpy.float32)


class GgufWeights:
    """The weights of a GGUF file, repacked into tiles when asked for.

    Args:
        file: open for as long as the weights.
        architecture: of the file.
        parameters: of the file.
        dtype: of the model's vectors.
        progress: gets the bytes read.
    """

    def __init__(
        self,
        file: GgufFile,
        architecture: Architecture,
        parameters: Parameters,
        dtype: str,
        progress: ProgressCallback,
    ) -> None:
        self._file, self._dtype, self._progress = file, dtype, progress
        self._orders = _orders(parameters) if architecture.interleaved else {}
        matrices = [tensor for tensor in file.tensors.values() if tensor.type.name in GGUF_KINDS]
        shapes = [tiles_shape(_kind(tensor), math.prod(tensor.shape[:-1]), tensor.shape[-1]) for tensor in matrices]
        self._pages = HugePages(sum(HugePages.aligned(tiles * size) for tiles, size in shapes))
        self._done, self._total = 0, sum(tensor.nbytes for tensor in matrices)

    def matrix(self, name: str, layer: int | None, rows: int, columns: int) -> Matrix:
        """See `Weights`."""
        full = _gguf_name(name, layer)
        tensor = self._file.tensors.get(f"{full}.weight")
        if tensor is None or (math.prod(tensor.shape[:-1]), tensor.shape[-1]) != (rows, columns):
            raise DescriptionError(f"its {full}.weight is {tensor and tensor.shape}, not {(rows, columns)}")
        kind = _kind(tensor)
        shape = tiles_shape(kind, rows, columns)
        tiles = self._pages.take(shape[0] * shape[1]).reshape(shape)
        order = self._orders.get(name)
        repack(self._file.blocks(tensor), tensor.type, kind, rows, columns, order, tiles)
        self._file.release(tensor)
        self._done += tensor.nbytes
        self._progress(Progress("reading", self._done, self._total))
        bias = self._vector(f"{full}.bias")
        return Matrix(tiles, bias if bias is None or order is None else bias[order], rows, columns, kind)

    def vector(self, name: str, layer: int | None, kind: str = "weight") -> Floats | None:
        """See `Weights`."""
        return self._vector(f"{_gguf_name(name, layer)}.{kind}")

    def has(self, name: str, layer: int) -> bool:
        """See `Weights`."""
        return f"{_gguf_name(name, layer)}.weight" in self._file.tensors

    def _vector(self, full: str) -> Floats | None:
        tensor = self._file.tensors.get(full)
        if tensor is None:
            return None
        if tensor.type.name != "F32":
            raise DescriptionError(f"{full} is {tensor.type.name}")
        return rounded(self._file.blocks(tensor).view(numpy.float32), self._dtype)


def _kind(tensor: GgufTensor) -> MatrixKind:
    kind = GGUF_KINDS.get(tensor.type.name)
    if kind is None or not columns_fit(kind, tensor.shape[-1]):
        raise DescriptionError(
            f"{tensor.name} is {tensor.type.name} with {tensor.shape[-1]} columns, which is not packed"
        )
    return kind


def _gguf_name(name: str, layer: int | None) -> str:
    return name if layer is None else f"blk.{layer}.{name}"


def _orders(parameters: Parameters) -> dict[str, NDArray[numpy.int64]]:
    """The rows of queries and keys in halves, out of a file that has them in pairs."""
    size = parameters.head_size
    head = numpy.arange(size).reshape(-1, 2).T.ravel()
    return {
        name: (numpy.arange(heads)[:, None] * size + head).ravel()
        for name, heads in (("attn_q", parameters.query_heads), ("attn_k", parameters.kv_heads))
    }


class FolderWeights:
    """The weights of a folder that `models.packed_weights` has written, mapped.

    Args:
        folder: with model.safetensors.
        kinds: packed formats by module name.
        architecture: of the model.

    Raises:
        DescriptionError: the file is not what was written.
    """

    def __init__(self, folder: Path, kinds: Mapping[str, str], architecture: Architecture) -> None:
        self._kinds, self._architecture = kinds, architecture
        self._arrays = mapped_tensors(folder / "model.safetensors")

    def matrix(self, name: str, layer: int | None, rows: int, columns: int) -> Matrix:
        """See `Weights`."""
        module = self._module(name, layer)
        tiles, kind = self._arrays.get(f"{module}.tiles"), self._kinds.get(module)
        if tiles is None or kind is None or kind not in MatrixKind.__members__:
            raise DescriptionError(f"it has no packed {module}")
        if tiles.shape != tiles_shape(MatrixKind[kind], rows, columns):
            raise DescriptionError(f"its {module} is {tiles.shape}, which is not {(rows, columns)} in {kind}")
        return Matrix(tiles, self._floats(f"{module}.bias"), rows, columns, MatrixKind[kind])

    def vector(self, name: str, layer: int | None, kind: str = "weight") -> Floats | None:
        """See `Weights`."""
        numbers = self._floats(f"{self._module(name, layer)}.{kind}")
        offset = self._architecture.norm_offset
        return numbers if numbers is None or not offset else numbers + numpy.float32(offset)

    def has(self, name: str, layer: int) -> bool:
        """See `Weights`."""
        module = self._module(name, layer)
        return not self._arrays.keys().isdisjoint((f"{module}.tiles", f"{module}.weight"))

    def _module(self, name: str, layer: int | None) -> str:
        return self._architecture.checkpoint_names.get(name, "").format(layer=layer)

    def _floats(self, name: str) -> Floats | None:
        stored = self._arrays.get(name)
        if stored is None and name.endswith("_bias.bias"):
            stored = self._arrays.get(name.removesuffix(".bias"))
        if stored is None or stored.dtype == numpy.float32:
            return stored
        if stored.dtype != numpy.uint16:
            raise DescriptionError(f"its {name} is in {stored.dtype}")
        return (stored.astype(numpy.uint32) << 16).view(numpy.float32)


_DTYPES = {"U8": numpy.uint8, "F32": numpy.float32, "BF16": numpy.uint16}
"""Of the tensors of a packed checkpoint, by safetensors' names."""


def mapped_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors of a safetensors file by name, as views of the mapped file; bfloat16 numbers are uint16.

    Raises:
        DescriptionError: the file is damaged, or has other dtypes.
    """
    data = map_weights(path)
    try:
        size = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:size])
        return {
            name: numpy.frombuffer(
                data, _DTYPES[entry["dtype"]], math.prod(entry["shape"]), size + entry["data_offsets"][0]
            ).reshape(entry["shape"])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DescriptionError(f"{path} is damaged: {error}") from error
