"""Allocates weights in huge pages: a decode step reads all of them, and TLB misses would cost 10% or more."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

_MIN_BYTES = 16 * 2**20
"""Minimum size of the weights, in bytes."""

_ALIGNMENT = 64
"""Alignment of tensors, in bytes."""


class HugePageBuffer:
    """A buffer from which tensors are allocated one by one; pages are committed when written.

    Uses transparent huge pages if the system supports madvise (Linux). The shapes are in bytes; without any nothing is
    allocated.
    """

    def __init__(self, shapes: Iterable[Iterable[int]]) -> None:
        size = sum(_aligned(prod(shape)) for shape in shapes)
        self._memory, self._begin = torch.empty(0, dtype=torch.uint8), 0
        if size:
            self._memory = torch.frombuffer(_allocate(size), dtype=torch.uint8)

    def take(self, shape: Iterable[int], dtype: torch.dtype = torch.uint8) -> Tensor:
        """Allocate the next tensor, uninitialized."""
        shape = tuple(shape)
        begin, size = self._begin, prod(shape) * dtype.itemsize
        self._begin += _aligned(size)
        return self._memory[begin : begin + size].view(dtype).view(shape)


def _allocate(size: int) -> mmap.mmap:
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
    held = (tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.numel())
    tensors = [tensor for tensor in held if tensor.device.type == "cpu" and tensor.is_contiguous()]
    sizes = {tensor.data_ptr(): [tensor.nbytes] for tensor in tensors}  # tied weights count once
    if sum(size for (size,) in sizes.values()) < _MIN_BYTES:
        return
    pages, moved = HugePageBuffer(sizes.values()), dict[int, Tensor]()
    for tensor in tensors:
        address = tensor.data_ptr()
        if address not in moved:
            moved[address] = pages.take(tensor.shape, tensor.dtype)
            moved[address].copy_(tensor.detach())
        tensor.data = moved[address].view(tensor.shape)


def advise_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Request huge pages for tensors mapped from files; not every filesystem supports them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    advise = ctypes.CDLL(None).madvise
    for address, size in storages.items():
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        advise(ctypes.c_void_p(start), ctypes.c_size_t(address + size - start), mmap.MADV_HUGEPAGE)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
