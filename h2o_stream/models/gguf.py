"""Reads GGUF files in place: metadata and memory-mapped tensors.

`gguf_header` parses the header, `gguf_export` converts it for transformers, and `gguf_names` maps tensors to weights.
"""

from __future__ import annotations

import mmap
import warnings
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from h2o_stream.errors import ModelNotFoundError, UnsupportedModelError
from h2o_stream.models.gguf_header import (
    DamagedError,
    GgufTensor,
    Header,
    UnknownTypeError,
    alignment_of,
    architecture_of,
)

FLOAT_TYPES = frozenset({GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16})
"""Types that store plain floating-point numbers, without blocks."""


class GgufFile:
    """A memory-mapped GGUF file; opening it reads only the header.

    The metadata are strings, numbers, short lists of numbers, and `SkippedArray` for other arrays; tensors are in file
    order. The architecture is llama.cpp's name of it.

    Raises:
        ModelNotFoundError: the file is unreadable or damaged.
        UnsupportedModelError: a tensor type is unknown, or the file is part of a split model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._map, size = _map_file(path)
            header = Header(self._map, size)
            self.metadata, self._spans = header.metadata()
            self.architecture = architecture_of(self.metadata)
            self.tensors = header.tensors(alignment_of(self.metadata))
        except DamagedError as error:
            reason = " ".join(str(error).split())  # names in the file may have line breaks
            raise self.damaged(reason) from None
        except UnknownTypeError as error:
            raise UnsupportedModelError(f"{path} cannot be served: {error}") from None
        except OSError as error:
            raise ModelNotFoundError(f"{path} cannot be read: {error.strerror or error}") from error
        if isinstance(parts := self.metadata.get("split.count", 1), int) and parts > 1:
            raise UnsupportedModelError(
                f"{path} is one of {parts} files of a model; join them with llama-gguf-split --merge"
            )

    def damaged(self, reason: str) -> ModelNotFoundError:
        """The exception for a file that does not make sense."""
        return ModelNotFoundError(f"{self.path} is damaged or not readable as GGUF: {reason}")

    @property
    def quantized(self) -> bool:
        """Whether any matrix is stored in a block format."""
        return any(len(tensor.shape) > 1 and tensor.type not in FLOAT_TYPES for tensor in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Size of all tensors in the file."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def blocks(self, tensor: GgufTensor) -> Tensor:
        """The bytes of a tensor, [nbytes] uint8: a read-only view of the mapped file."""
        view = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # numpy array is not writable
            return torch.from_numpy(view)

    def release(self, tensor: GgufTensor) -> None:
        """Release the memory pages of a tensor; later reads load them from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, tensor.offset + tensor.nbytes - start)

    def raw_bytes(self, key: str) -> bytes:
        """The bytes of a key and its value in the file."""
        return self._map[slice(*self._spans[key])]


def _map_file(path: Path) -> tuple[mmap.mmap, int]:
    with path.open("rb") as file:
        start = file.read(8)
        if start[:4] != b"GGUF":
            raise DamagedError(f"it starts with {start[:4]!r}, not with b'GGUF'")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), file.seek(0, 2)
