"""Writes packed matrices straight into the mapped file that later starts map, without torch.

Everything else is read from the model's own files.
"""

from __future__ import annotations

import json
import mmap
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream.base.mapped_files import reserve_room
from h2o_stream.models.packed_cache import WEIGHTS_FILE, NotCachedError, new_packed_folder
from h2o_stream.native.matrix import DescriptionError
from h2o_stream.runtime.safetensors_files import mapped_tensors

_ALIGNMENT = 64
"""Where the first matrix begins is a multiple of these bytes; the size of each matrix is one, too."""


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix of the packed file: its name there, the shape of its tiles, and what packs it into such an array."""

    name: str
    shape: tuple[int, int]
    fill: Callable[[NDArray[numpy.uint8]], None]


Kept = Mapping[str, NDArray[Any]]
"""The tiles in such a file, by name."""


def kept_tiles(kept: Kept | None, name: str, shape: tuple[int, int]) -> NDArray[numpy.uint8] | None:
    """The tiles of a matrix, None if none are kept at all; raises DescriptionError if there are others."""
    if kept is None:
        return None
    tiles = kept.get(name)
    if tiles is None or tiles.shape != shape or tiles.dtype != numpy.uint8:
        raise DescriptionError(f"{name} is {None if tiles is None else tiles.shape}, not {shape}")
    return tiles


def write_packed(
    entries: Iterable[PackedMatrix], metadata: Mapping[str, str], folder: Path, notify: Callable[[str], None]
) -> None:
    """Write all matrices of a model as a folder of packed weights, atomically, unless that is impossible.

    The metadata are those of `packed_cache`. `notify` gets a line about what is written, or why it is not.

    Raises:
        DescriptionError: a matrix cannot be packed.
    """
    entries = list(entries)
    size = sum(prod(entry.shape) for entry in entries)
    with suppress(NotCachedError), new_packed_folder(folder, size, metadata, notify) as partial:
        data = _mapped(partial / WEIGHTS_FILE, entries)
        start = len(data) - size
        for entry in entries:
            entry.fill(numpy.frombuffer(data, numpy.uint8, prod(entry.shape), start).reshape(entry.shape))
            start += prod(entry.shape)
        threading.Thread(target=data.flush).start()  # a crash of the machine must not leave zeros


def packed_difference(entries: Iterable[PackedMatrix], folder: Path) -> str:
    """The first matrix in a folder that is not, bit by bit, what would be written; or nothing.

    Raises:
        DescriptionError: the folder is damaged, or a matrix cannot be packed.
    """
    arrays = mapped_tensors(folder / WEIGHTS_FILE)
    for entry in entries:
        expected, tiles = numpy.empty(entry.shape, numpy.uint8), arrays.get(entry.name)
        entry.fill(expected)
        if tiles is None or not numpy.array_equal(tiles, expected):
            return entry.name
    return ""


def _mapped(path: Path, entries: list[PackedMatrix]) -> mmap.mmap:
    """A new file of safetensors, mapped; its tensors are zero."""
    header, end = {}, 0
    for entry in entries:
        offsets = [end, end + prod(entry.shape)]
        header[entry.name] = {"dtype": "U8", "shape": entry.shape, "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    with path.open("w+b") as file:
        reserve_room(file, 0, 8 + len(text) + end)
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        return mmap.mmap(file.fileno(), 0)
