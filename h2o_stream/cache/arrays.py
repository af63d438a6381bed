"""Tensors as numpy arrays and back, without a copy where that is possible; bfloat16 numbers are uint16 arrays."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from h2o_stream.cache.state import Array


def to_array(tensor: Tensor) -> Array:
    """A tensor's numbers: a view of them if they are on the CPU."""
    tensor = tensor.detach().cpu()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def to_tensor(array: Array) -> Tensor:
    """A tensor on the CPU: a view of the array, unless that is read-only."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def to_arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """`to_array` of each."""
    return {name: to_array(tensor) for name, tensor in tensors.items()}


def to_tensors(arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    """`to_tensor` of each."""
    return {name: to_tensor(array) for name, array in arrays.items()}
