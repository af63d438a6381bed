"""Weights in large pages of memory: a step reads all of them, and looking up small pages costs it a tenth or more."""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch import Tensor

_LEAST = 16 * 2**20
"""Bytes of weights that make it worth while."""

_LINE = 64
"""Bytes of a line of the cache, which tensors begin with."""


def into_large_pages(model: Any) -> None:
    """Move the weights of a model on the CPU into one allocation of large pages, in their order.

    Tensors are moved one by one, so that no more than one of them is there twice. Nothing is done where the system has
    no such pages for the asking (other than Linux) or the model is small.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if _movable(tensor)]
    size = sum({tensor.data_ptr(): _whole_lines(tensor.nbytes) for tensor in tensors}.values())
    if size < _LEAST:
        return
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    memory, begin = torch.frombuffer(pages, dtype=torch.uint8), 0
    moved: dict[int, Tensor] = {}  # tied weights are one
    for tensor in tensors:
        place = tensor.data_ptr()
        if place not in moved:
            moved[place] = memory[begin : begin + tensor.nbytes].view(tensor.dtype)
            moved[place].copy_(tensor.detach().flatten())
            begin += _whole_lines(tensor.nbytes)
        tensor.data = moved[place].view(tensor.shape)


def _whole_lines(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _movable(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel() > 0
