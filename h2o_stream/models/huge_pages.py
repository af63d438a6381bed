"""Weights in large pages of memory: a step reads all of them, and looking up small pages costs it a tenth or more."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

_LEAST = 16 * 2**20
"""Bytes of weights that make it worth while."""

_LINE = 64
"""Bytes of a line of the processor's cache, which tensors begin with."""


class HugePageBuffer:
    """Memory for tensors that are made one by one; it is taken from the system when they are written.

    Large pages where the system has them for the asking (Linux), else as they come.

    Args:
        shapes: of the tensors that will be taken, as if all were of bytes; an empty one for no memory at all.
    """

    def __init__(self, shapes: Iterable[Iterable[int]]) -> None:
        size = sum(_whole_lines(prod(shape)) for shape in shapes)
        self._memory, self._begin = torch.empty(0, dtype=torch.uint8), 0
        if size:
            self._memory = torch.frombuffer(_allocated(size), dtype=torch.uint8)

    def take(self, shape: Iterable[int], dtype: torch.dtype = torch.uint8) -> Tensor:
        """The next tensor; its numbers are not set."""
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
    """Move the weights of a model on the CPU into one allocation of large pages, in their order.

    Tensors are moved one by one, so that no more than one of them is there twice. Nothing is done where the system has
    no such pages for the asking (other than Linux) or the model is small.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if _movable(tensor)]
    sizes = {tensor.data_ptr(): [tensor.nbytes] for tensor in tensors}  # tied weights are one
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
    """Ask for large pages for what is read from now on of tensors mapped from files; not every filesystem has them."""
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
