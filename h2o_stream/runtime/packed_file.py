"""Writes packed weights straight into the mapped file that later starts map, without torch.

The file has transformers' names; of an architecture with tensors in other forms than transformers' it has the numbers
of the GGUF file, by llama.cpp's names.
"""

from __future__ import annotations

import json
import mmap
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy
from numpy.typing import NDArray

from h2o_stream.base.mapped_files import reserve_room
from h2o_stream.models.packed_cache import FORMAT, WEIGHTS_FILE, NotCachedError, new_packed_folder
from h2o_stream.native.abi import MatrixKind
from h2o_stream.runtime.safetensors_files import mapped_tensors

_ALIGNMENT = 64
"""Of the first tensor, in bytes; packed tensors come first, and are multiples of it."""


@dataclass(frozen=True)
class Entry:
    """A tensor of the packed file.

    Attributes:
        name: in the file: module name and ``tiles``, ``weight`` or ``bias``.
        dtype: safetensors' name of it.
        fill: writes the tensor into an array, uint8 [nbytes].
        kind: packed format, None if it is not packed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    fill: Callable[[NDArray[numpy.uint8]], None]
    kind: MatrixKind | None = None

    @classmethod
    def packed(
        cls, module: str, kind: MatrixKind, tiles: tuple[int, int], fill: Callable[[NDArray[numpy.uint8]], None]
    ) -> Entry:
        """A packed matrix; `fill` gets an array of the shape `tiles`."""
        return cls(f"{module}.tiles", "U8", tiles, tiles[0] * tiles[1], lambda out: fill(out.reshape(tiles)), kind)


def write_packed(
    entries: Iterable[Entry], metadata: Mapping[str, str], folder: Path, notify: Callable[[str], None]
) -> None:
    """Write all tensors of a model as a folder of packed weights, atomically, unless that is impossible.

    The metadata are those of `packed_cache`. `notify` gets a line about what is written, or why it is not.

    Raises:
        DescriptionError: a tensor has no name, or cannot be packed.
    """
    entries = sorted(entries, key=lambda entry: entry.kind is None)
    size = sum(entry.nbytes for entry in entries)
    with suppress(NotCachedError), new_packed_folder(folder, size, metadata, notify) as partial:
        data = _mapped(partial / WEIGHTS_FILE, entries)
        start = len(data) - size
        for entry in entries:
            entry.fill(numpy.frombuffer(data, numpy.uint8, entry.nbytes, start))
            start += entry.nbytes
        modules = {entry.name.removesuffix(".tiles"): entry.kind.name for entry in entries if entry.kind is not None}
        config = {"quantization_config": {"quant_method": "h2o", "format": FORMAT, "modules": modules}}
        (partial / "config.json").write_text(json.dumps(config), encoding="utf-8")
        threading.Thread(target=data.flush).start()  # a crash of the machine must not leave zeros


def packed_difference(entries: Iterable[Entry], folder: Path) -> str:
    """The first tensor in a folder that is not, bit by bit, what would be written; or nothing.

    Raises:
        DescriptionError: the folder is damaged, or a tensor cannot be packed.
    """
    arrays = mapped_tensors(folder / WEIGHTS_FILE)
    for entry in entries:
        expected, data = numpy.empty(entry.nbytes, numpy.uint8), arrays.get(entry.name)
        if entry.kind is None and data is not None and data.nbytes != entry.nbytes:
            continue  # in the dtype of an earlier start
        entry.fill(expected)
        if data is None or not numpy.array_equal(data.reshape(-1).view(numpy.uint8), expected):
            return entry.name
    return ""


def _mapped(path: Path, entries: list[Entry]) -> mmap.mmap:
    """A new file of safetensors, mapped; its tensors are zero."""
    header, end = {}, 0
    for entry in entries:
        offsets = [end, end + entry.nbytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    with path.open("w+b") as file:
        reserve_room(file, 0, 8 + len(text) + end)
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        return mmap.mmap(file.fileno(), 0)
