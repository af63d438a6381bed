"""Rotations of RoPE by distance. Imports no torch."""

from __future__ import annotations

from typing import TypeVar

import numpy
from numpy.typing import NDArray

from h2o_stream.base.memory import anonymous_memory

_Number = TypeVar("_Number", numpy.float32, numpy.int16)

FINE_ROWS = 32
"""Rotations by other distances are composed of one below this and one by a multiple of it (native/src/abi.h)."""


class Rotations:
    """Cosines and sines by distance, of angles [rotary_dims / 2] per position; layers and caches share it."""

    _table: NDArray[numpy.float32] = numpy.empty((0, 0), numpy.float32)
    _codes: NDArray[numpy.int16] = numpy.empty((0, 0), numpy.int16)

    def __init__(self, frequencies: NDArray[numpy.float32]) -> None:
        self._frequencies = frequencies

    def on_cpu(self, limit: int) -> NDArray[numpy.float32]:
        """Rotations of distances from 0 to limit - 1 or more: [N, rotary_dims] float32, cosines, then as many sines."""
        if len(self._table) < limit:
            self._table = self._make(limit)
        return self._table

    def codes(self, limit: int) -> NDArray[numpy.int16]:
        """`on_cpu` for products in fixed point: the first `FINE_ROWS` rows, then the multiples of `FINE_ROWS`."""
        table = self.on_cpu(max(limit, FINE_ROWS))
        if len(self._codes) < FINE_ROWS + len(table) // FINE_ROWS:
            chosen = numpy.concatenate((table[:FINE_ROWS], table[::FINE_ROWS])) / table[0, 0]
            self._codes = _lines(len(chosen), table.shape[1], numpy.int16)
            numpy.rint(chosen * 32767, out=self._codes, casting="unsafe")
        return self._codes

    def _make(self, limit: int) -> NDArray[numpy.float32]:
        rows = 1 << (limit - 1).bit_length()  # the same for most limits: caches keep the table that they have
        angles = numpy.outer(numpy.arange(rows, dtype=numpy.float32), self._frequencies)
        table = _lines(rows, 2 * angles.shape[1], numpy.float32)
        return numpy.concatenate((numpy.cos(angles), numpy.sin(angles)), 1, out=table)


def _lines(rows: int, columns: int, dtype: type[_Number]) -> NDArray[_Number]:
    """Rows that begin with cache lines: others would be read in two pieces, and attention took a fifth longer."""
    memory = anonymous_memory(rows * columns * dtype().itemsize)
    return numpy.frombuffer(memory, dtype).reshape(rows, columns)
