"""Reads GGUF files in place: metadata and memory-mapped tensors.

`gguf_header` parses the header, `gguf_tokenizer` converts the tokenizer in it.
"""

from __future__ import annotations

import mmap
import os
import re
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from h2o_stream.base.memory import free_bytes
from h2o_stream.errors import ModelNotFoundError, UnsupportedModelError
from h2o_stream.models.gguf_header import (
    DamagedError,
    GgufTensor,
    Header,
    SkippedArray,
    UnknownTypeError,
    alignment_of,
    architecture_of,
    read_array,
)
from h2o_stream.models.other_files import describe_gguf
from h2o_stream.native.gguf_types import TensorType

_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
"""How llama.cpp names the files of a split model."""

_MAX_HEADERS = 8
"""Headers that are kept: loading opens a file several times."""

FLOAT_TYPES = frozenset({TensorType.F32, TensorType.F16, TensorType.BF16})
"""Types that store plain floating-point numbers, without blocks."""


_STACKS = ("altup_proj.weight", "altup_unembd_proj.weight")
"""Tensors that are several matrices of a model (Gemma 3n)."""

UNROTATED = 1e29
"""Factor on a wavelength of RoPE from which on it stands for no rotation."""


class GgufFile:
    """A memory-mapped GGUF file, or the files that one was split into; opening it reads only the headers.

    The metadata are strings, numbers, short lists of numbers, and `SkippedArray` for other arrays; tensors are in file
    order. The architecture is llama.cpp's name of it.

    Args:
        path: path of the file, or of any part of a split one (`gguf_parts`).

    Raises:
        ModelNotFoundError: a file is missing, unreadable or damaged.
        UnsupportedModelError: a tensor type is unknown.
    """

    def __init__(self, path: Path) -> None:
        self.path, *others = gguf_parts(path)
        self.tensors: dict[str, GgufTensor] = {}
        self._maps: list[mmap.mmap] = []
        if others and not self.path.exists():
            raise ModelNotFoundError(f"{path} is a part of a model, of which {self.path.name} is not beside it")
        self.metadata = self._open(self.path)
        if what := describe_gguf(self.metadata, self.tensors):
            raise UnsupportedModelError(f"{path} is {what}")
        number, count = (self.metadata.get(f"split.{key}", default) for key, default in (("no", 0), ("count", 1)))
        if type(number) is not int or type(count) is not int:
            raise self.damaged(f"it is part {number!r} of {count!r}, which are no numbers")
        if count not in (0, 1 + len(others)):
            number += 1
            named = f"model-00001-of-{count:05}.gguf"
            raise ModelNotFoundError(
                f"{path} is part {number} of {count} of a model; name all parts like {named}, in one folder"
            )
        try:
            self.architecture = architecture_of(self.metadata)
        except DamagedError as error:
            raise self.damaged(str(error)) from None
        for other in others:
            if not other.exists():
                raise ModelNotFoundError(f"{path} is a part of a model, of which {other.name} is not beside it")
            self._open(other)

    def _open(self, path: Path) -> dict[str, Any]:
        """Map a file and add its tensors. Returns its metadata."""
        try:
            data, _ = _map_file(path)
            stat = path.stat()
            metadata, tensors = _header(path, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
            if twice := tensors.keys() & self.tensors.keys():
                raise DamagedError(f"tensor {min(twice)} is in another part, too")
        except DamagedError as error:
            reason = " ".join(str(error).split())  # names in the file may have line breaks
            raise _damaged(path, reason) from None
        except UnknownTypeError as error:
            raise UnsupportedModelError(f"{path} cannot be served: {' '.join(str(error).split())}") from None
        except OSError as error:
            raise ModelNotFoundError(f"{path} cannot be read: {error.strerror or error}") from error
        part = len(self._maps)
        self._maps.append(data)
        for name, tensor in tensors.items():
            each = _unstacked(tensor) if name in _STACKS and len(tensor.shape) > 2 else [tensor]
            self.tensors |= {piece.name: replace(piece, part=part) if part else piece for piece in each}
        return dict(metadata)

    def damaged(self, reason: str) -> ModelNotFoundError:
        """The exception for a file that does not make sense."""
        return _damaged(self.path, reason)

    @property
    def quantized(self) -> bool:
        """Whether any matrix is stored in a block format."""
        return any(len(tensor.shape) > 1 and tensor.type not in FLOAT_TYPES for tensor in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Size of all tensors in the file."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def array(self, key: str) -> list[Any]:
        """All items of an array in the metadata, however long; none if the file has no such key.

        Raises:
            ModelNotFoundError: it is not an array, or a string in it is not UTF-8.
        """
        value = self.metadata.get(key, [])
        try:
            items = read_array(self._maps[0], value) if isinstance(value, SkippedArray) else value
        except DamagedError as error:
            raise self.damaged(f"{key}: {error}") from None
        if not isinstance(items, list):
            raise self.damaged(f"{key} is {items!r}, not an array")
        return items

    def blocks(self, tensor: GgufTensor) -> np.ndarray[Any, Any]:
        """The bytes of a tensor, [nbytes] uint8: a read-only view of the mapped file.

        Raises:
            ModelNotFoundError: the file has been cut short since it was mapped; to read it would end the process.
        """
        data = self._maps[tensor.part]
        if (size := data.size()) < tensor.offset + tensor.nbytes:
            raise self.damaged(f"it was cut short, to {size} bytes, while it was read")
        return np.frombuffer(data, np.uint8, tensor.nbytes, tensor.offset)

    def release(self, tensor: GgufTensor) -> None:
        """Release the memory pages of a tensor; later reads load them from the file again.

        The system forgets them, too, if it cannot keep all tensors beside what they are repacked to.
        """
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        size = tensor.offset + tensor.nbytes - start
        self._maps[tensor.part].madvise(mmap.MADV_DONTNEED, start, size)
        if self._is_large and hasattr(os, "posix_fadvise"):
            with suppress(OSError), gguf_parts(self.path)[tensor.part].open("rb") as file:
                os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_DONTNEED)

    @cached_property
    def _is_large(self) -> bool:
        return 2 * self.nbytes > free_bytes()


def _unstacked(stack: GgufTensor) -> list[GgufTensor]:
    """The matrices of a tensor, with their numbers in their names."""
    stem, size = stack.name.removesuffix(".weight"), stack.nbytes // stack.shape[0]
    return [
        replace(
            stack,
            name=f"{stem}.{number}.weight",
            shape=stack.shape[1:],
            offset=stack.offset + number * size,
            nbytes=size,
        )
        for number in range(stack.shape[0])
    ]


def gguf_parts(path: Path) -> list[Path]:
    """The files of a model in order, from the name of one: model-00001-of-00003.gguf has two others."""
    named = _PART.fullmatch(path.name)
    if named is None:
        return [path]
    stem, count = named[1], int(named[2])
    return [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)] or [path]


def gguf_stem(path: Path) -> str:
    """The name of a model's file without its end, and without the number of its part."""
    named = _PART.fullmatch(path.name)
    return Path(named[1]).name if named else path.stem


def _damaged(path: Path, reason: str) -> ModelNotFoundError:
    return ModelNotFoundError(f"{path} is damaged or not readable as GGUF: {reason}")


@lru_cache(maxsize=_MAX_HEADERS)
def _header(path: Path, *state: int) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Metadata and tensors of a file, parsed again only if its state changes."""
    header = Header(*_map_file(path))
    metadata = header.metadata()
    return metadata, header.tensors(alignment_of(metadata))


def _map_file(path: Path) -> tuple[mmap.mmap, int]:
    with path.open("rb") as file:
        start = file.read(8)
        if start[:4] != b"GGUF":
            raise DamagedError(f"it starts with {start[:4]!r}, not with b'GGUF'")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), file.seek(0, 2)
