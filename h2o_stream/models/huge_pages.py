"""Puts the weights of transformers models in huge pages, see `pages`."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

from h2o_stream.models.pages import HugePages

_MIN_BYTES = 16 * 2**20
"""Minimum size of the weights, in bytes."""


class HugePageBuffer:
    """Tensors in huge pages, allocated one by one; see `HugePages`. The shapes are in bytes."""

    def __init__(self, shapes: Iterable[Iterable[int]]) -> None:
        self._pages = HugePages(map(prod, shapes))

    def take(self, shape: Iterable[int], dtype: torch.dtype = torch.uint8) -> Tensor:
        """Allocate the next tensor, uninitialized."""
        shape = tuple(shape)
        return torch.from_numpy(self._pages.take(prod(shape) * dtype.itemsize)).view(dtype).view(shape)


def move_to_huge_pages(model: Any) -> None:
    """Move the weights of a CPU model into one buffer of huge pages, in order.

    Tensors are moved one by one, so at most one exists twice. Does nothing for small models and on systems without
    transparent huge pages.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    buffers = (tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.numel())
    tensors = [tensor for tensor in buffers if tensor.device.type == "cpu" and tensor.is_contiguous()]
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
