"""Rotations of RoPE by distance. Imports no torch."""

from __future__ import annotations

import numpy
from numpy.typing import NDArray

from h2o_stream.base.memory import anonymous_memory


class Rotations:
    """Cosines and sines by distance, of angles [rotary_dims / 2] per position; layers and caches share it."""

    _table: NDArray[numpy.float32] = numpy.empty((0, 0), numpy.float32)

    def __init__(self, frequencies: NDArray[numpy.float32]) -> None:
        self._frequencies = frequencies

    def on_cpu(self, limit: int) -> NDArray[numpy.float32]:
        """Rotations of distances from 0 to limit - 1 or more: [N, rotary_dims] float32, cosines, then as many sines."""
        if len(self._table) < limit:
            self._table = self._make(limit)
        return self._table

    def _make(self, limit: int) -> NDArray[numpy.float32]:
        rows = 1 << (limit - 1).bit_length()  # the same for most limits: caches keep the table that they have
        angles = numpy.outer(numpy.arange(rows, dtype=numpy.float32), self._frequencies)
        # Rows begin with cache lines: others would be read in two pieces, and attention took a fifth longer.
        table = numpy.frombuffer(anonymous_memory(2 * angles.nbytes), numpy.float32).reshape(rows, -1)
        return numpy.concatenate((numpy.cos(angles), numpy.sin(angles)), 1, out=table)
