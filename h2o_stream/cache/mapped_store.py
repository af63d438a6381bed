"""Keys and values in mapped files: the system keeps in memory what is used, and writes the rest to disk."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h2o_stream.cache.quantized_store import QuantizedStore
from h2o_stream.cache.store import Store
from h2o_stream.config import CachePlan
from h2o_stream.errors import H2OStreamError
from h2o_stream.resources import cache_folder


class _Mapped:
    """Before a class of stores: each of its `names` is moved to a file of its own whenever it is set."""

    def __setattr__(self, name: str, value: Any) -> None:
        names: tuple[str, ...] = type(self).names  # type: ignore[attr-defined]
        object.__setattr__(self, name, mapped_to_file(value) if name in names else value)


class MappedStore(_Mapped, Store):
    """A `Store` in files."""


class MappedQuantizedStore(_Mapped, QuantizedStore):
    """A `QuantizedStore` in files."""


def make_store(plan: CachePlan, key: Tensor, value: Tensor, slots: int, on_disk: bool) -> Store:
    """The store for keys and values like [B, Hkv, *, D]."""
    if plan.kv_bits == 16:
        return (MappedStore if on_disk else Store)(key, value, slots)
    quantized = MappedQuantizedStore if on_disk else QuantizedStore
    return quantized(key, value, slots, plan.kv_bits, plan.exact_sinks, plan.residual)


def mapped_to_file(x: Tensor) -> Tensor:
    """A copy in a file in the cache folder, which disappears with the tensor.

    Raises:
        H2OStreamError: the file cannot be written, such as when the disk is full.
    """
    if not x.nbytes:
        return x
    folder = cache_folder() / "slots"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(dir=folder)
        try:
            if hasattr(os, "posix_fallocate"):  # a full disk is an error now, not a crash at the first write
                os.posix_fallocate(handle, 0, x.nbytes)
            copy = torch.from_file(path, shared=True, size=x.numel(), dtype=x.dtype)
        finally:
            os.close(handle)
            with suppress(PermissionError):  # Windows keeps the name as long as it is mapped
                Path(path).unlink()
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise H2OStreamError(
            f"{x.nbytes:,} bytes of the cache cannot be put on disk ({reason}); "
            "make room, lower --window, or take --cache-device cpu"
        ) from error
    return copy.view(x.shape).copy_(x)
