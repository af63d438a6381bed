"""Packed matrices: as they are asked for, or straight in the mapped file that later starts map. Without torch.

Everything else is read from the model's own files.
"""

from __future__ import annotations

import mmap
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream.base.mapped_files import reserve_room
from h2o_stream.base.safetensors_header import safetensors_header
from h2o_stream.models.packed_cache import WEIGHTS_FILE, NotCachedError, new_packed_folder
from h2o_stream.models.pages import HugePages
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.matrix import DescriptionError
from h2o_stream.native.packing import tiles_shape
from h2o_stream.runtime.safetensors_files import mapped_tensors
from h2o_stream.runtime.weights import Weights

_ALIGNMENT = 64
"""Where the first matrix begins is a multiple of these bytes; the size of each matrix is one, too."""


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix to be packed.

    Attributes:
        name: what its tiles are called in the file.
        fill: packs it into an array of its `shape`.
    """

    name: str
    kind: MatrixKind
    rows: int
    columns: int
    fill: Callable[[NDArray[numpy.uint8]], None]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of its tiles, see `native.packing.tiles_shape`."""
        return tiles_shape(self.kind, self.rows, self.columns)

    @property
    def nbytes(self) -> int:
        """Bytes of its tiles."""
        return prod(self.shape)


class PackedWeights(Weights):
    """Weights whose matrices are packed as they are asked for, unless they were packed before.

    Attributes:
        kept: the tiles that were packed before, by name; None if none were.
    """

    kept: Mapping[str, NDArray[Any]] | None = None
    _pages: HugePages | None = None

    @abstractmethod
    def entries(self) -> Iterator[PackedMatrix]:
        """All matrices that are packed, in the order of the files; raises DescriptionError if one cannot be packed."""

    def tiles_of(self, matrix: PackedMatrix) -> NDArray[numpy.uint8]:
        """The tiles of a matrix: those that are kept, or packed now, into huge pages."""
        if self.kept is not None:
            return self.kept_tiles(matrix, self.kept)
        if self._pages is None:
            self._pages = HugePages(entry.nbytes for entry in self.entries())
        tiles = self._pages.take(matrix.nbytes).reshape(matrix.shape)
        matrix.fill(tiles)
        return tiles

    @staticmethod
    def kept_tiles(matrix: PackedMatrix, kept: Mapping[str, NDArray[Any]]) -> NDArray[numpy.uint8]:
        """The tiles of a matrix among those that are kept; raises DescriptionError if they are others."""
        tiles = kept.get(matrix.name)
        if tiles is None or tiles.shape != matrix.shape or tiles.dtype != numpy.uint8:
            raise DescriptionError(f"{matrix.name} is {None if tiles is None else tiles.shape}, not {matrix.shape}")
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
    size = sum(entry.nbytes for entry in entries)
    with suppress(NotCachedError), new_packed_folder(folder, size, metadata, notify) as partial:
        data = _mapped(partial / WEIGHTS_FILE, entries)
        start = len(data) - size
        for entry in entries:
            entry.fill(numpy.frombuffer(data, numpy.uint8, entry.nbytes, start).reshape(entry.shape))
            start += entry.nbytes
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
    tensors = [(entry.name, "U8", entry.shape, entry.nbytes) for entry in entries]
    header = safetensors_header(tensors, {"format": "pt"}, _ALIGNMENT)
    with path.open("w+b") as file:
        reserve_room(file, len(header) + sum(entry.nbytes for entry in entries))
        file.write(header)
        file.flush()
        return mmap.mmap(file.fileno(), 0)
