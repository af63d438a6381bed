"""Compares gated delta rules whose weights are laid out in different ways, and may be packed in different formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream.native.description import DENSE, Matrix
from h2o_stream.native.mixers import GatedDelta, HeadColumns
from h2o_stream.native.packing import gather
from h2o_stream.runtime.rotations import Floats
from h2o_stream.runtime.weights import as_floats

_ROUNDING = 0.02
"""Of weights that are packed once more, in 8 bits, relative to their norm."""

_SAMPLED_ROWS = 64
"""Of each part of the projections and of the output projection."""


def layout_differences(name: str, ours: GatedDelta, theirs: GatedDelta) -> Iterator[str]:
    """Where the projections and the output projection of two mixers differ by more than packing.

    Args:
        name: of the mixers, for what is yielded.
        ours: of a file.
        theirs: of a transformers model, of the same sizes.
    """
    shared = ours.heads // ours.key_heads
    sizes = {"query": ours.key_size, "key": ours.key_size, "beta": shared, "decay": shared}
    for part in ("query", "key", "value", "gate", "beta", "decay"):
        size = sizes.get(part, shared * ours.value_size)
        found, expected = (
            _rows(mixer.projections, _sampled(_places(getattr(mixer.columns, part), mixer.key_heads, size)))
            for mixer in (ours, theirs)
        )
        if not _close(found, expected):
            yield f"{part} of {name}: other weights"
    rows = _sampled(numpy.arange(ours.out.rows))
    found, expected = (_with_shared_keys_together(mixer, _rows([mixer.out], rows)) for mixer in (ours, theirs))
    if not _close(found, expected):
        yield f"out of {name}: other weights"


def _places(columns: HeadColumns, heads: int, size: int) -> NDArray[numpy.int64]:
    """The rows of a part of all heads."""
    starts = columns.offset + columns.stride * numpy.arange(heads, dtype=numpy.int64)
    return (starts[:, None] + numpy.arange(size, dtype=numpy.int64)).ravel()


def _sampled(rows: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
    return rows[numpy.unique(numpy.linspace(0, len(rows) - 1, _SAMPLED_ROWS).astype(numpy.int64))]


def _rows(matrices: Sequence[Matrix], rows: NDArray[numpy.int64]) -> Floats:
    """Rows [n, columns] of matrices below each other, as numbers."""
    found: Floats = numpy.zeros((len(rows), matrices[0].columns), numpy.float32)
    first = 0
    for matrix in matrices:
        inside = (rows >= first) & (rows < first + matrix.rows)
        found[inside] = _numbers(matrix, rows[inside] - first) * numpy.float32(matrix.scale)
        first += matrix.rows
    return found


def _numbers(matrix: Matrix, rows: NDArray[numpy.int64]) -> Floats:
    weights = as_array(matrix.weights)
    if matrix.kind in DENSE:
        return as_floats(weights[rows], "matrix")
    numbers: Floats = gather(weights, matrix.kind, matrix.rows, matrix.columns, rows, "float32")
    return numbers


def as_array(tensor: Any) -> NDArray[Any]:
    """A tensor or an array as an array; no torch is imported for the latter."""
    if isinstance(tensor, numpy.ndarray):
        return tensor
    from h2o_stream.cache.arrays import to_array

    return to_array(tensor)


def _with_shared_keys_together(mixer: GatedDelta, rows: Floats) -> Floats:
    """Rows of the output projection with the columns of value heads that share a key head after one another."""
    if not mixer.out_in_turns:
        return rows
    turns = rows.reshape(len(rows), -1, mixer.key_heads, mixer.value_size)
    return turns.swapaxes(1, 2).reshape(rows.shape)


def _close(found: Floats, expected: Floats) -> bool:
    return bool(numpy.linalg.norm(found - expected) <= _ROUNDING * numpy.linalg.norm(expected))
