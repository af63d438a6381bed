"""Recurrent states in arrays, which native code updates: the counterpart of `cache.recurrent` for one stream."""

from __future__ import annotations

from collections.abc import ItemsView, Mapping
from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream.cache.state import require_array
from h2o_stream.errors import H2OStreamError


class RecurrentArrays:
    """The states of a layer, [1, ...] float32 by the names of `cache.recurrent.states_of`.

    Args:
        shapes: of each, without the row. Nothing is allocated before the first token.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._arrays: dict[str, NDArray[Any]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of what is allocated."""
        return sum(array.nbytes for array in self._arrays.values())

    def items(self) -> ItemsView[str, NDArray[Any]]:
        """What is allocated, by name."""
        return self._arrays.items()

    def allocated(self) -> list[NDArray[Any]]:
        """The states in the order of their names, zero if they are new."""
        if not self._arrays:
            self._arrays = {name: numpy.zeros((1, *shape), numpy.float32) for name, shape in self._shapes.items()}
        return list(self._arrays.values())

    def reset(self) -> None:
        """Forget and release them."""
        self._arrays = {}

    def load(self, saved: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a copy of states, among other arrays by name; uint16 numbers are bfloat16.

        Raises:
            H2OStreamError: one is missing, or does not fit.
        """
        self._arrays = {name: _loaded(require_array(saved, name), name, shape) for name, shape in self._shapes.items()}


def _loaded(array: NDArray[Any], name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    if array.shape != (1, *shape) or array.dtype not in (numpy.float32, numpy.uint16):
        raise H2OStreamError(f"the state does not fit: {name} is {array.dtype} {array.shape}, {(1, *shape)} is needed")
    if array.dtype == numpy.uint16:
        return (array.astype(numpy.uint32) << 16).view(numpy.float32)
    return array.copy()
