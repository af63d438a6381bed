"""Compares the description of a file with that of the transformers model that was loaded from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream.cache.arrays import to_array
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.description import Description, Matrix, Norm
from h2o_stream.native.experts import Experts
from h2o_stream.native.mixers import GatedDelta
from h2o_stream.runtime.weights import as_floats

_ROUNDING = 1e-6
"""Of parameters and frequencies, which are computed in other orders."""

_WIDE = {
    MatrixKind.BFLOAT16: MatrixKind.FLOAT32,
    MatrixKind.BFLOAT16_COLUMNS: MatrixKind.FLOAT32_COLUMNS,
}
"""Formats of dense matrices that may have the same numbers."""

_SAMPLED_BYTES = 2**20
"""Of each matrix, so many bytes or numbers at its start and at its end are compared."""


def difference(ours: Description, theirs: Description) -> str:
    """Where two descriptions differ, or nothing."""
    return next(_differences("the model", ours, theirs), "")


def same_weights(ours: Description, theirs: Description) -> bool:
    """Whether all weights of all matrices are equal, in descriptions between which `difference` finds nothing."""
    pairs = zip((*ours.matrices, ours.embedding), (*theirs.matrices, theirs.embedding), strict=True)
    whole = slice(None)
    return all(numpy.array_equal(_numbers(mine, whole), _numbers(other, whole)) for mine, other in pairs)


def _differences(name: str, ours: Any, theirs: Any) -> Iterator[str]:
    if isinstance(ours, Matrix) and isinstance(theirs, Matrix):
        yield from _matrices(name, ours, theirs)
    elif isinstance(ours, Experts) and isinstance(theirs, Experts) and ours.stride != theirs.stride:
        yield from _experts(name, ours, theirs)
    elif isinstance(ours, GatedDelta) and isinstance(theirs, GatedDelta) and _layout(ours) != _layout(theirs):
        same = {key: getattr(ours, key) for key in ("projections", "columns", "out", "out_in_turns")}
        yield from _differences(name, ours, replace(theirs, **same))  # logits tell whether these are right
    elif isinstance(ours, Norm) and isinstance(theirs, Norm) and ours.weight is not None and theirs.weight is not None:
        mine, other = as_array(ours.weight), as_array(theirs.weight)
        if not numpy.allclose(mine, other, rtol=_ROUNDING, atol=_ROUNDING):  # 1 + w is rounded near 0, too
            yield f"weight of {name}: other numbers"
        yield from _differences(name, replace(ours, weight=None), replace(theirs, weight=None))
    elif is_dataclass(ours) and type(ours) is type(theirs):
        for field in fields(ours):
            mine, other = getattr(ours, field.name), getattr(theirs, field.name)
            yield from _differences(f"{field.name} of {name}", mine, other)
    elif isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            yield f"{name}: {len(ours)} and {len(theirs)}"
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
            yield from _differences(f"{number} of {name}", mine, other)
    elif isinstance(ours, float) and isinstance(theirs, int | float):
        if not math.isclose(ours, theirs, rel_tol=_ROUNDING):
            yield f"{name}: {ours} and {theirs}"
    elif hasattr(ours, "shape") and hasattr(theirs, "shape"):
        if not numpy.allclose(as_array(ours), as_array(theirs), rtol=_ROUNDING, atol=0):
            yield f"{name}: other numbers"
    elif ours != theirs:
        yield f"{name}: {ours} and {theirs}"


def _layout(mixer: GatedDelta) -> tuple[Any, ...]:
    return mixer.columns, len(mixer.projections), mixer.out_in_turns


def _experts(name: str, ours: Experts, theirs: Experts) -> Iterator[str]:
    """The same for experts of which one side has the rows of gates and of what they are for in one matrix."""
    for field in fields(ours):
        if field.name not in ("gate", "up", "stride"):
            mine, other = getattr(ours, field.name), getattr(theirs, field.name)
            yield from _differences(f"{field.name} of {name}", mine, other)
    for part in ("gate", "up"):
        matrices = [getattr(experts, part) for experts in (ours, theirs)]
        if None in matrices:
            yield from _differences(f"{part} of {name}", *matrices)
            continue
        for expert in range(ours.router.matrix.rows):
            rows = (
                matrix.row_range(expert * experts.stride, experts.inner_size)
                for matrix, experts in zip(matrices, (ours, theirs), strict=True)
            )
            yield from _matrices(f"{part} of {name}, expert {expert}", *rows)


def _matrices(name: str, ours: Matrix, theirs: Matrix) -> Iterator[str]:
    shapes = [(_kind(matrix), matrix.rows, matrix.columns) for matrix in (ours, theirs)]
    if shapes[0] != shapes[1]:
        yield f"{name}: {shapes[0]} and {shapes[1]}"
        return
    yield from _differences(f"bias of {name}", ours.bias, theirs.bias)
    parts = (slice(None, _SAMPLED_BYTES), slice(-_SAMPLED_BYTES, None))
    if not all(numpy.array_equal(_numbers(ours, part), _numbers(theirs, part)) for part in parts):
        yield f"{name}: other weights"


def _kind(matrix: Matrix) -> MatrixKind:
    """The storage format; the two of dense matrices may have the same numbers."""
    return _WIDE.get(matrix.kind, matrix.kind)


def _numbers(matrix: Matrix, part: slice) -> NDArray[Any]:
    """Some numbers of a dense matrix in float32, or some bytes of a packed one."""
    weights = as_array(matrix.weights).reshape(-1)[part]
    return as_floats(weights, "matrix") if matrix.kind in _WIDE else weights


def as_array(tensor: Any) -> NDArray[Any]:
    """A tensor or an array as an array."""
    return tensor if isinstance(tensor, numpy.ndarray) else to_array(tensor)
