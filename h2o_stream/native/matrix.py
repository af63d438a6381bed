"""Matrices and norms of a model's description. Arrays may be tensors of torch or arrays of numpy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from h2o_stream.native import abi, packing
from h2o_stream.native.abi import MatrixKind, NormKind
from h2o_stream.native.pointers import Array, numbers_in, pointer


class DescriptionError(Exception):
    """The model cannot be described; the message gives the reason in one line."""

    def __str__(self) -> str:
        return " ".join(super().__str__().split())  # names in files may have line breaks


def require(fits: bool, what: str) -> None:
    """Raises DescriptionError with what does not fit, unless it fits.

    Whatever is handed to native code was compared like this before: it trusts sizes.
    """
    if not fits:
        raise DescriptionError(what)


def check_count(array: Array | None, count: int, what: str) -> None:
    """Raises DescriptionError if there is an array that is not so many numbers."""
    if array is not None and numbers_in(array) != count:
        raise DescriptionError(f"{what} is {numbers_in(array)} numbers, not {count}")


DENSE = {
    MatrixKind.FLOAT32: "float32",
    MatrixKind.BFLOAT16: "bfloat16",
    MatrixKind.FLOAT32_COLUMNS: "float32",
    MatrixKind.BFLOAT16_COLUMNS: "bfloat16",
}
"""Matrices that are not packed, with the dtype of their numbers."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """Weights of a linear layer or an embedding.

    Attributes:
        weights: [rows, columns] float32 or bfloat16, or uint8 of `packing.tiles_shape`; shared with the model. Where
            columns follow one another, as many numbers.
        bias: [rows] float32, or None.
        scale: factor on what it gives, including the bias.
    """

    weights: Array
    bias: Array | None
    rows: int
    columns: int
    kind: MatrixKind
    scale: float = 1.0

    def check_shape(self, rows: int, columns: int, what: str) -> None:
        """Raises DescriptionError if it has another shape."""
        if (self.rows, self.columns) != (rows, columns):
            raise DescriptionError(f"{what} has {self.rows} rows of {self.columns}, not {rows} of {columns}")

    def row_range(self, first: int, count: int) -> Matrix:
        """Rows [first, first + count) in the same memory.

        Raises:
            DescriptionError: the rows of a packed matrix do not start at a tile.
        """
        tile = 1 if self.kind in DENSE else packing.ROWS
        if first % tile:
            raise DescriptionError(f"rows {first} of a packed matrix do not start at a multiple of {tile}")
        weights = self.weights[first // tile : -(-(first + count) // tile)]
        bias = None if self.bias is None else self.bias[first : first + count]
        return Matrix(weights, bias, count, self.columns, self.kind, self.scale)

    def scaled(self, results: float, inputs: float = 1.0) -> Matrix:
        """The same weights, with factors on what it gives and on what it takes."""
        bias = self.bias if self.bias is None or inputs == 1.0 else self.bias / inputs
        return replace(self, bias=bias, scale=self.scale * results * inputs)

    def to_struct(self) -> abi.Matrix:
        """As a C structure."""
        dense = DENSE.get(self.kind)
        size = self.rows * self.columns if dense else packing.packed_bytes(self.kind, self.rows, self.columns)
        weights = pointer(self.weights, dense or "uint8", size)
        bias = pointer(self.bias, "float32", self.rows)
        return abi.Matrix(weights, bias, self.rows, self.columns, self.kind, self.scale)


@dataclass(frozen=True, eq=False)
class Norm:
    """A normalization; offsets such as Gemma's 1 + w are folded into the weight.

    Attributes:
        kind: RMS or layer norm, or none.
        weight: [n] float32, or None without a norm.
        bias: [n] float32, or None.
        epsilon: added to the mean square or variance.
    """

    kind: NormKind = NormKind.NONE
    weight: Array | None = None
    bias: Array | None = None
    epsilon: float = 0.0

    def check_size(self, size: int, what: str) -> None:
        """Raises DescriptionError if its weights are not so many."""
        for array in (self.weight, self.bias):
            check_count(array, size, what)

    def to_struct(self, size: int) -> abi.Norm:
        """As a C structure, of a norm whose weights are `size` numbers."""
        weight, bias = (pointer(x, "float32", size) for x in (self.weight, self.bias))
        return abi.Norm(weight, bias, self.epsilon, self.kind)


NO_NORM: Final = Norm()
"""In place of a norm."""
