"""The way from arrays to native code: their addresses.

Arrays are tensors of torch or arrays of numpy, where bfloat16 is uint16; nothing here imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy

from h2o_stream.errors import H2OStreamError

Array: TypeAlias = Any
"""A tensor of torch or an array of numpy."""

_NUMPY_DTYPES = {"bfloat16": "uint16"}
"""Types that numpy lacks, and what holds their bits."""


def pointer(array: Array | None, dtype: str, count: int, *, strided: bool = False) -> int:
    """The address of an array on the CPU: the only way from arrays to native code, which trusts what is said here.

    Args:
        array: the caller keeps it alive. Subclasses are refused, because they may keep their numbers elsewhere.
        dtype: dtype of the numbers that native code reads or writes: "float32", "bfloat16", "int64", ...
        count: how many of them, at least.
        strided: whether native code also takes the strides; otherwise the array must be contiguous.

    Returns:
        0 (null) for None.

    Raises:
        H2OStreamError: the array is another one.
    """
    if array is None:
        return 0
    if isinstance(array, numpy.ndarray):
        plain = type(array) in (numpy.ndarray, numpy.memmap) and array.dtype == _NUMPY_DTYPES.get(dtype, dtype)
        if plain and array.flags.aligned and (strided or array.flags.c_contiguous) and array.size >= count:
            return int(array.__array_interface__["data"][0])  # sooner than `ctypes.data`
        strides, device = str(array.strides), "cpu"
    else:
        torch = sys.modules["torch"]
        has_memory = array.layout == torch.strided
        if (
            type(array) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
            and dtype_name(array.dtype) == dtype
            and array.is_cpu
            and has_memory
            and (strided or array.is_contiguous())
            and not array.is_neg()
            and array.numel() >= count
            and array.data_ptr() % array.element_size() == 0
        ):
            address: int = array.data_ptr()
            return address
        strides, device = str(array.stride() if has_memory else array.layout), str(array.device)
    raise H2OStreamError(
        f"native code takes {count} numbers of {dtype} in the memory of the CPU, not a {type(array).__name__} of "
        f"{array.dtype} {tuple(array.shape)} with strides {strides} on {device}; use --engine eager"
    )


def numbers_in(array: Array) -> int:
    """How many numbers an array has."""
    return int(array.size if isinstance(array, numpy.ndarray) else array.numel())


def dtype_name(dtype: Any) -> str:
    """The name of a dtype of torch, as `pointer` takes it; names stay as they are."""
    return str(dtype).removeprefix("torch.")


def row_bytes(array: Array) -> int:
    """Bytes from one row of an array to the next."""
    if isinstance(array, numpy.ndarray):
        return array.strides[0]
    stride: int = array.stride(0) * array.element_size()
    return stride


def empty(shape: Sequence[int], dtype: str, like: Array) -> Array:
    """An uninitialized array on the CPU, of the library that `like` is of."""
    if isinstance(like, numpy.ndarray):
        return numpy.empty(shape, _NUMPY_DTYPES.get(dtype, dtype))
    torch = sys.modules["torch"]
    return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
