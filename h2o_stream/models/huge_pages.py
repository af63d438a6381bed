"""Allocates weights in huge pages: a decode step reads all of them, and TLB misses would cost 10% or more."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

_LEAST = 16 * 2**20
"""Minimum size of the weights, in bytes."""

_LINE = 64
"""Alignment of tensors, in bytes."""


class HugePageBuffer:
    """A buffer from which tensors are allocated one by one; pages are committed when written.

    Uses transparent huge pages if the system supports madvise (Linux).

    Args:
        shapes: shapes of the tensors in bytes; an empty iterable allocates nothing.
    """

    def __init__(self, shapes: Iterable[Iterable[int]]) -> None:
        size = sum(_whole_lines(prod(shape)) for shape in shapes)
        self._memory, self._begin = torch.empty(0, dtype=torch.uint8), 0
        if size:
            self._memory = torch.frombuffer(_allocated(size), dtype=torch.uint8)

    def take(self, shape: Iterable[int], dtype: torch.dtype = torch.uint8) -> Tensor:
        """Allocate the next tensor, uninitialized."""
        shape = tuple(shape)
        begin, size = self._begin, prod(shape) * dtype.itemsize
        self._begin += _whole_lines(size)
        return self._memory[begin : begin + size].view(dtype).view(shape)


def _allocated(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def move_to_huge_pages(model: Any) -> None:
    """Move the weights of a CPU model into one buffer of huge pages, in order.

    Tensors are moved one by one, so at most one exists twice. Does nothing for small models and on systems without
    transparent huge pages.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if _movable(tensor)]
    sizes = {tensor.data_ptr(): [tensor.nbytes] for tensor in tensors}  # tied weights count once
    if sum(size for (size,) in sizes.values()) < _LEAST:
        return
    pages, moved = HugePageBuffer(sizes.values()), dict[int, Tensor]()
    for tensor in tensors:
        place = tensor.data_ptr()
        if place not in moved:
            moved[place] = pages.take(tensor.shape, tensor.dtype)
            moved[place].copy_(tensor.detach())
        tensor.data = moved[place].view(tensor.shape)


def advise_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Request huge pages for tensors mapped from files; not every filesystem supports them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    advise = ctypes.CDLL(None).madvise
    for place, size in storages.items():
        start = place // mmap.PAGESIZE * mmap.PAGESIZE
        advise(ctypes.c_void_p(start), ctypes.c_size_t(place + size - start), mmap.MADV_HUGEPAGE)


def _whole_lines(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _movable(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel() > 0
