"""Memory in huge pages for weights: a decode step reads all of them, and TLB misses would cost 10% or more."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path

import numpy
from numpy.typing import NDArray

from h2o_stream.base.mapped_files import prefer_huge_pages
from h2o_stream.base.memory import anonymous_memory

_ALIGNMENT = 64
"""Alignment of arrays, in bytes."""


class HugePages:
    """A buffer for arrays of these sizes in bytes, which are taken one by one.

    Uses transparent huge pages if the system supports madvise (Linux).
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self._memory, self._begin = numpy.empty(0, numpy.uint8), 0
        if size := sum(map(_aligned, sizes)):
            self._memory = numpy.frombuffer(_allocate(size), numpy.uint8)

    def take(self, size: int) -> NDArray[numpy.uint8]:
        """The next bytes, uninitialized."""
        begin = self._begin
        self._begin += _aligned(size)
        return self._memory[begin : begin + size]


def _aligned(size: int) -> int:
    """What an array of that many bytes takes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _allocate(size: int) -> mmap.mmap:
    pages = anonymous_memory(size)
    prefer_huge_pages(pages)
    return pages


def map_weights(path: Path) -> mmap.mmap:
    """A file of weights, mapped in huge pages where the file system has them."""
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    prefer_huge_pages(data)
    return data
