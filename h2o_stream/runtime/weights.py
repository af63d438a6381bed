"""Weights by llama.cpp's names: what all have, and those of checkpoints, mapped.

Vectors are float32 arrays that hold what the model's dtype can hold, as when transformers loads them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy
from numpy.typing import NDArray

from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.description import OTHER_SENSES, DescriptionError, Matrix
from h2o_stream.native.packing import NOT_PACKED
from h2o_stream.runtime.families.architecture import EMBEDDING, OUTPUT, Architecture, parameter_names
from h2o_stream.runtime.file_numbers import rounded
from h2o_stream.runtime.parameters import Parameters
from h2o_stream.runtime.rotations import Floats
from h2o_stream.runtime.safetensors_files import checkpoint_files, mapped_tensors


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

        Small matrices that are not packed are vectors, too; so are parameters of recurrent layers.
        """

    def sized_vector(self, name: str, layer: int, size: int, kind: str = "weight") -> Floats:
        """A `vector` of so many numbers; raises DescriptionError if it is missing, or of another size."""
        vector = self.vector(name, layer, kind)
        if vector is None or vector.size != size:
            raise DescriptionError(f"its {name} of layer {layer} is not {size} numbers")
        return vector

    def small_matrix(self, name: str, layer: int | None, rows: int, columns: int, dtype: str) -> Matrix:
        """A small matrix that is not packed, in the dtype of the model.

        Raises:
            DescriptionError: it is missing, or of another size.
        """
        bias = self.vector(name, layer, "bias")
        return small_matrix(self.vector(name, layer), bias, rows, columns, dtype, f"{name} of layer {layer}")

    def has(self, name: str, layer: int) -> bool:
        """Whether the layer has this weight."""


def dense_matrix(values: NDArray[Any], bias: Floats | None, dtype: str) -> Matrix:
    """A matrix that is not packed, of numbers [rows, columns].

    Those in bfloat16 (uint16) stay so in a model of float32, which multiplies the same. Those in float32 are rounded to
    the dtype of the model. There are no kernels for float16: it is exact in float32, and in bfloat16 it is rounded, as
    where transformers reads it.
    """
    if values.dtype == numpy.float16:
        values = values.astype(numpy.float32)
    if values.dtype == numpy.float32 and dtype == "bfloat16":
        values = (rounded(values, dtype).view(numpy.uint32) >> 16).astype(numpy.uint16)
    kind = MatrixKind.FLOAT32 if values.dtype == numpy.float32 else MatrixKind.BFLOAT16
    rows, columns = values.shape
    return Matrix(values, bias, rows, columns, kind)


def gguf_name(name: str, layer: int | None) -> str:
    """What a module is called in a GGUF file, in a layer or outside of them."""
    return name if layer is None else f"blk.{layer}.{name}"


def small_matrix(values: Floats | None, bias: Floats | None, rows: int, columns: int, dtype: str, name: str) -> Matrix:
    """A matrix that is not packed, of numbers that `dtype` holds.

    Raises:
        DescriptionError: there are none, or another number.
    """
    if values is None or values.size != rows * columns:
        raise DescriptionError(f"its {name} is not {rows} rows of {columns}")
    return dense_matrix(values.reshape(rows, columns), bias, dtype)


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix of a checkpoint, of one module or of `count` experts, with the names of its arrays in the files."""

    module: str
    name: str
    layer: int | None
    count: int
    rows: int
    columns: int
    arrays: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of all experts below each other, and columns."""
        return self.count * self.rows, self.columns


class CheckpointWeights(Weights):
    """The dense weights of a folder of safetensors files, mapped; they are copied only if they are rounded.

    Raises:
        DescriptionError: there are other files, or one is damaged.
    """

    def __init__(self, folder: Path, architecture: Architecture, parameters: Parameters, dtype: str) -> None:
        self._architecture, self._parameters, self._dtype = architecture, parameters, dtype
        self.arrays: dict[str, NDArray[Any]] = {}
        for path in checkpoint_files(folder):
            for name, array in mapped_tensors(path).items():
                if not _OTHER_SENSES.intersection(name.split(".")):
                    name = _WITHIN.sub("", name)
                    for part, other in architecture.renamed.items():
                        name = name.replace(part, other)
                    self.arrays[name] = array
        self.num_weights = sum(array.size for array in self.arrays.values())

    def module_name(self, name: str, layer: int | None) -> str:
        """The name of a module in transformers."""
        return self._architecture.module_name(name, layer)

    def matrices(self) -> Iterator[StoredMatrix]:
        """All linear layers, the embedding and the experts of each layer, but for `NOT_PACKED`."""
        layers = range(self._parameters.num_layers)
        for name in self._architecture.checkpoint_names:
            of_router = not NOT_PACKED.isdisjoint(self._architecture.checkpoint_names[name].split("."))
            if of_router or (name == OUTPUT and self._parameters.tied):
                continue
            for layer in (None,) if name in (EMBEDDING, OUTPUT) else layers:
                module = self.module_name(name, layer)
                names = self._array_names(module)
                shapes = {self.arrays[each].shape for each in names}
                shape = shapes.pop() if len(shapes) == 1 else ()
                stacked = name.endswith("_exps") and len(shape) == 3
                if len(shape) == 2 or (stacked and not self._architecture.interleaved_experts):
                    count, rows, columns = (len(names), *shape)[-3:]
                    if stacked and self._architecture.transposed_experts:
                        rows, columns = columns, rows
                    yield StoredMatrix(module, name, layer, count, rows, columns, names)

    def _array_names(self, module: str) -> tuple[str, ...]:
        """The arrays of a module's weights: one, stacked or not, or one of each expert; none if there are none."""
        if f"{module}.weight" in self.arrays:
            return (f"{module}.weight",)
        if _EXPERTS not in module:
            return ()
        names = (f"{module}.weight".replace(_EXPERTS, f"{_EXPERTS}{number}.") for number in itertools.count())
        return (module,) if module in self.arrays else tuple(itertools.takewhile(self.arrays.__contains__, names))

    def stored(self, name: str, layer: int | None, rows: int, columns: int) -> NDArray[Any]:
        """A matrix [rows, columns] as in the file, in float32, bfloat16 (uint16) or float16.

        Raises:
            DescriptionError: it is missing or of another shape.
        """
        module = self.module_name(name, layer)
        stored = self._get(module, "weight")
        if stored is None and _EXPERTS in module:
            stored = self._of_experts(module)
        if stored is not None and stored.ndim == 3:
            stored = self._below_each_other(name, stored)
        if stored is None or stored.shape != (rows, columns) or stored.dtype == numpy.uint8:
            raise DescriptionError(
                f"its {module}.weight is {None if stored is None else stored.shape}, not {(rows, columns)}"
            )
        return stored

    def _get(self, module: str, kind: str) -> NDArray[Any] | None:
        """The weight or bias of a module, which may be a parameter of another one; None if there is none."""
        name, bare = parameter_names(module, kind)
        return self.arrays.get(name, self.arrays.get(bare))

    def _below_each_other(self, name: str, stored: NDArray[Any]) -> NDArray[Any]:
        """The stacked matrices of experts as one, those of the next expert below; a copy if they are transposed."""
        if self._architecture.transposed_experts or self._architecture.interleaved_experts:
            stored = stored.swapaxes(1, 2)
        if self._architecture.interleaved_experts and name == _GATES_AND_UPS:
            stored = numpy.concatenate((stored[:, ::2], stored[:, 1::2]), 1)
        return numpy.ascontiguousarray(stored).reshape(-1, stored.shape[-1])

    def _of_experts(self, module: str) -> NDArray[Any] | None:
        """The matrices of all experts of a layer below each other, as a copy; None if there are none."""
        arrays = [self.arrays[name] for name in self._array_names(module)]
        if len({(array.shape[1:], array.dtype) for array in arrays}) > 1:
            raise DescriptionError(f"the experts of {module} have different sizes")
        return numpy.concatenate(arrays) if arrays and arrays[0].ndim else None

    def matrix(self, name: str, layer: int | None, rows: int, columns: int) -> Matrix:
        """See `Weights` and `dense_matrix`."""
        stored = self.stored(name, layer, rows, columns)
        return dense_matrix(stored, self.vector(name, layer, "bias"), self._dtype)

    def vector(self, name: str, layer: int | None, kind: str = "weight") -> Floats | None:
        """See `Weights`."""
        module = self.module_name(name, layer)
        stored = self._get(module, kind) if module else None
        if stored is None:
            return None
        if kind == "bias" and name == _GATES_AND_UPS and self._architecture.interleaved_experts:
            stored = numpy.concatenate((stored[..., ::2], stored[..., 1::2]), -1)
        values = as_floats(stored, name).reshape(-1)
        return as_used(rounded(values, self._dtype), self._architecture, name, kind)

    def has(self, name: str, layer: int) -> bool:
        """See `Weights`."""
        module = self.module_name(name, layer)
        first = module.replace(_EXPERTS, f"{_EXPERTS}0.")
        return bool(module) and any(each in self.arrays for each in (f"{module}.weight", module, f"{first}.weight"))


def as_used(values: Floats, architecture: Architecture, name: str, kind: str) -> Floats:
    """The numbers of a checkpoint's or a model's vector, with what is added to weights of norms, or made of logs."""
    if name == "ssm_a":
        return -numpy.exp(values)
    has_offset = name.endswith("norm") and kind == "weight" and name != "ssm_norm"
    offset = architecture.norm_offset if has_offset else 0
    return values + numpy.float32(offset) if offset else values


def as_floats(stored: NDArray[Any], name: str) -> Floats:
    """Numbers of a file in float32; raises DescriptionError if they are in another dtype."""
    if stored.dtype in (numpy.float32, numpy.float16):
        return stored.astype(numpy.float32, copy=False)
    if stored.dtype != numpy.uint16:
        raise DescriptionError(f"its {name} is in {stored.dtype}")
    return (stored.astype(numpy.uint32) << 16).view(numpy.float32)


_WITHIN = re.compile(r"(?<![^.])language_model\.")
"""The module for text, in models that take images, too."""

_OTHER_SENSES = OTHER_SENSES | {"visual"}
"""Modules that tokens of text do not go through, by their names in checkpoints."""

_GATES_AND_UPS = "ffn_gate_up_exps"

_EXPERTS = ".experts."
"""In names of modules of which each expert has one; on disk its number follows."""
