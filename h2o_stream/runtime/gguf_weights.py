"""The weights of a GGUF file; everything stays mapped, or packed as it is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream.base.progress import Progress, ProgressCallback
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.gguf_header import GgufTensor
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.description import DescriptionError, Matrix
from h2o_stream.native.gguf_types import TensorType
from h2o_stream.native.matrix import check_count
from h2o_stream.native.packing import GGUF_KINDS, columns_fit, pack, repack
from h2o_stream.runtime.families.architecture import Architecture
from h2o_stream.runtime.file_numbers import as_needed, row_orders
from h2o_stream.runtime.merged import PARTS, WHOLES, dequantized, merged
from h2o_stream.runtime.packed_file import PackedMatrix, PackedWeights
from h2o_stream.runtime.parameters import Parameters, tensor_name
from h2o_stream.runtime.rotations import Floats
from h2o_stream.runtime.weights import as_floats, dense_matrix, gguf_name, small_matrix


class GgufWeights(PackedWeights):
    """The weights of a GGUF file, repacked into tiles when asked for.

    Args:
        file: open for as long as the weights.
        architecture: the row of the file's architecture.
        parameters: what the file says of the model.
        dtype: dtype of the model's vectors.
        progress: gets the bytes read.

    Attributes:
        reads: whether a tensor is read, by its name.
        num_dense: how many numbers there are in matrices that are not packed, of layers that are read.
    """

    def __init__(
        self,
        file: GgufFile,
        architecture: Architecture,
        parameters: Parameters,
        dtype: str,
        progress: ProgressCallback,
    ) -> None:
        self.file, self.architecture, self.dtype, self._progress = file, architecture, dtype, progress
        self.reads = parameters.reads
        self._orders = row_orders(architecture, parameters)
        read = [tensor for tensor in file.tensors.values() if self.reads(tensor.name)]
        self._matrices = [tensor for tensor in read if not is_dense(tensor)]
        dense = (tensor for tensor in read if is_dense(tensor) and len(tensor.shape) > 1)
        self.num_dense = sum(math.prod(tensor.shape) for tensor in dense)
        self._done, self._total = 0, sum(tensor.nbytes for tensor in self._matrices)

    def matrix(self, name: str, layer: int | None, rows: int, columns: int) -> Matrix:
        """See `Weights`."""
        names = (gguf_name(key, layer) for key in (name, *PARTS.get(name, ())[:1]))
        tensor = next(filter(None, (self.file.tensors.get(f"{key}.weight") for key in names)), None)
        if tensor is not None and tensor.type.name == "F32" and name in self.architecture.stored_as_in_gguf:
            bias = self.vector(name, layer, "bias")
            return small_matrix(self.numbers(tensor), bias, rows, columns, self.dtype, tensor.name)
        if tensor is not None and is_dense(tensor) and name not in PARTS:
            return self._dense(tensor, self.vector(name, layer, "bias"), rows, columns)
        packed = None if tensor is None else self._packed(tensor)
        if packed is None or (packed.rows, packed.columns) != (rows, columns):
            stored = None if packed is None else (packed.rows, packed.columns)
            raise DescriptionError(f"its {gguf_name(name, layer)}.weight is {stored}, not {(rows, columns)}")
        return Matrix(self.tiles_of(packed), self.vector(name, layer, "bias"), rows, columns, packed.kind)

    def vector(self, name: str, layer: int | None, kind: str = "weight") -> Floats | None:
        """See `Weights`."""
        tensor = self._found(name, layer, kind)
        return None if tensor is None else self.numbers(tensor)

    def entries(self) -> Iterator[PackedMatrix]:
        """See `PackedWeights`."""
        return filter(None, map(self._packed, self._matrices))

    def _kept_name(self, tensor: GgufTensor) -> str:
        """What the tiles of a matrix are called in such a folder: by transformers' name, in most families."""
        layer, inner, _ = tensor_name(tensor.name)
        module = "" if self.architecture.stored_as_in_gguf else self.architecture.module_name(inner, layer)
        return f"{module or gguf_name(inner, layer)}.tiles"

    def row_order(self, name: str) -> NDArray[numpy.int64] | None:
        """The rows of the file in the order in which they are needed, by a name in a layer; None for as they are."""
        return self._orders.get(name)

    def has(self, name: str, layer: int) -> bool:
        """See `Weights`."""
        return self._found(name, layer, "weight") is not None

    def _found(self, name: str, layer: int | None, kind: str) -> GgufTensor | None:
        """A tensor, if there is one; files may have the name of weights without what they are."""
        full = gguf_name(name, layer)
        tensor = self.file.tensors.get(f"{full}.{kind}")
        return self.file.tensors.get(full) if tensor is None and kind == "weight" else tensor

    def _packed(self, tensor: GgufTensor) -> PackedMatrix | None:
        """How a matrix is packed; None for one that is packed with another, as the second of its `PARTS`.

        Raises:
            DescriptionError: it cannot be packed.
        """
        kind, rows, columns = packed_kind(tensor), math.prod(tensor.shape[:-1]), tensor.shape[-1]
        name = tensor_name(tensor.name)[1]
        if name in WHOLES:
            first, second = self._parts(tensor)
            packed_kind(second)
            if name != PARTS[WHOLES[name]][0]:
                return None
            kind, rows = MatrixKind.INT8, first.shape[0] * (first.shape[-1] + second.shape[-2])
            columns = second.shape[-1]
        return PackedMatrix(self._kept_name(tensor), kind, rows, columns, partial(self._repack, tensor))

    def _parts(self, tensor: GgufTensor) -> list[GgufTensor]:
        """The tensors of a whole matrix that one of them belongs to."""
        layer, inner, _ = tensor_name(tensor.name)
        parts = [self.file.tensors.get(f"{gguf_name(name, layer)}.weight") for name in PARTS[WHOLES[inner]]]
        if not all(part is not None and len(part.shape) == 3 for part in parts):
            raise DescriptionError(f"it has {tensor.name} without what belongs to it")
        return [part for part in parts if part is not None]

    def _repack(self, tensor: GgufTensor, out: NDArray[numpy.uint8]) -> None:
        """Repack a matrix into `out`, its tiles, and release it.

        Raises:
            DescriptionError: it cannot be packed.
        """
        name = tensor_name(tensor.name)[1]
        parts = self._parts(tensor) if name in WHOLES else [tensor]
        if name in WHOLES:
            pack(merged(self.file, *parts), MatrixKind.INT8, out)
        else:
            rows, columns, kind = math.prod(tensor.shape[:-1]), tensor.shape[-1], packed_kind(tensor)
            order = self.row_order(name)
            check_count(order, rows, f"the order of {tensor.name}'s rows")
            repack(self.file.blocks(tensor), tensor.type, kind, rows, columns, order, out)
        for part in parts:
            self.file.release(part)
            self._done += part.nbytes
        self._progress(Progress("reading", self._done, self._total))

    def numbers(self, tensor: GgufTensor, as_saved: bool = False) -> Floats:
        """The numbers of a tensor that is not packed, as the model's dtype holds them.

        Args:
            tensor: a tensor of the file.
            as_saved: leave out the offset of norms, as transformers' checkpoints do.

        Raises:
            DescriptionError: its type cannot be read.
        """
        _, name, kind = tensor_name(tensor.name)
        values = as_floats(self._stored(tensor), tensor.name).reshape(-1)
        return as_needed(values, name, kind, self.architecture, self._orders, self.dtype, as_saved)

    def _dense(self, tensor: GgufTensor, bias: Floats | None, rows: int, columns: int) -> Matrix:
        """A matrix that is not packed, in the order of rows that transformers has.

        Raises:
            DescriptionError: it has another shape, or would have to be put together anew.
        """
        if (math.prod(tensor.shape[:-1]), tensor.shape[-1]) != (rows, columns):
            raise DescriptionError(f"its {tensor.name} is {tensor.shape}, not {(rows, columns)}")
        by_columns = bias is not None and "_exps." in tensor.name  # in transformers: they could not be compared
        if self.architecture.interleaved_heads or by_columns:
            raise DescriptionError(f"{tensor.name} is {tensor.type.name}")
        stored, order = self._stored(tensor).reshape(rows, columns), self._orders.get(tensor_name(tensor.name)[1])
        matrix = dense_matrix(stored if order is None else stored[order], bias, self.dtype)
        if not numpy.may_share_memory(matrix.weights, stored):
            self.file.release(tensor)
        return matrix

    def _stored(self, tensor: GgufTensor) -> NDArray[Any]:
        """The numbers of a tensor that is not packed, in the dtype of the file."""
        stored = _STORED.get(tensor.type)
        return dequantized(self.file, tensor) if stored is None else self.file.blocks(tensor).view(stored)


_STORED = {TensorType.F32: numpy.float32, TensorType.F16: numpy.float16, TensorType.BF16: numpy.uint16}
"""The dtypes of numbers; uint16 stands for bfloat16."""


def is_dense(tensor: GgufTensor) -> bool:
    """Whether a tensor is not packed: numbers, or blocks of a type that kernels do not know, which are unpacked."""
    return tensor.type.name not in GGUF_KINDS


def packed_kind(tensor: GgufTensor) -> MatrixKind:
    """The packed format of a matrix.

    Raises:
        DescriptionError: it cannot be packed.
    """
    kind = GGUF_KINDS.get(tensor.type.name)
    if kind is None or not columns_fit(kind, tensor.shape[-1]):
        raise DescriptionError(
            f"{tensor.name} is {tensor.type.name} with {tensor.shape[-1]} columns, which is not packed"
        )
    return kind
