"""Repacks a GGUF file straight into the mapped file that later starts map, without torch.

The file has the names and the config that `models.load` expects of a folder of packed weights; of an architecture with
tensors in other forms than transformers' it has the file's numbers, by llama.cpp's names.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream.models.gguf_header import GgufTensor
from h2o_stream.models.packed_folder import FORMAT, WEIGHTS_FILE
from h2o_stream.native.description import DescriptionError
from h2o_stream.native.packing import GGUF_KINDS
from h2o_stream.runtime.gguf_weights import GgufWeights
from h2o_stream.runtime.parameters import NOT_WEIGHTS, tensor_name
from h2o_stream.runtime.weights import packed_name

_ALIGNMENT = 64
"""Of the first tensor, in bytes; packed tensors come first, and are multiples of it."""

_NAMES = {"float32": "F32", "bfloat16": "BF16"}
"""Of dtypes in safetensors."""


@dataclass(frozen=True)
class _Entry:
    """A tensor of a file, and the same in the packed file."""

    tensor: GgufTensor
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def write_packed(source: GgufWeights, metadata: Mapping[str, str], folder: Path, notify: Callable[[str], None]) -> None:
    """Write the weights of a GGUF file as a folder of packed weights, unless that is impossible.

    Args:
        source: of the file.
        metadata: for `packed.json`, see `user_cache`.
        folder: written atomically; its parents are created.
        notify: gets a line about what is written, or why it is not.

    Raises:
        DescriptionError: a tensor has no name in transformers, or cannot be packed.
    """
    from h2o_stream.models.new_packed_folder import NotCachedError, new_packed_folder

    entries = sorted(_entries(source), key=lambda entry: entry.dtype != "U8")
    size = sum(entry.nbytes for entry in entries)
    with suppress(NotCachedError), new_packed_folder(folder, size, metadata, notify) as partial:
        data = _mapped(partial / WEIGHTS_FILE, entries)
        start = len(data) - size
        for entry in entries:
            _write(source, entry, numpy.frombuffer(data, numpy.uint8, entry.nbytes, start))
            start += entry.nbytes
        packed = [entry for entry in entries if entry.dtype == "U8"]
        forms = [(entry, source.form(entry.tensor)) for entry in packed]
        modules = {entry.name.removesuffix(".tiles"): form.kind.name for entry, form in forms if form}
        config = {"quantization_config": {"quant_method": "h2o", "format": FORMAT, "modules": modules}}
        (partial / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _entries(source: GgufWeights) -> Iterator[_Entry]:
    for tensor in source.file.tensors.values():
        layer, inner, kind = tensor_name(tensor.name)
        if NOT_WEIGHTS.fullmatch(tensor.name) or (layer is not None and layer >= source.num_layers):
            continue  # layers beyond the last one only guess further tokens
        module = packed_name(source.architecture, inner, layer)
        if not module:
            raise DescriptionError(f"{tensor.name} has no name in transformers")
        if tensor.type.name in GGUF_KINDS:
            if form := source.form(tensor):
                yield _Entry(tensor, f"{module}.tiles", "U8", form.tiles, form.nbytes)
        elif source.architecture.other_forms:
            if tensor.type.name != "F32":
                raise DescriptionError(f"{tensor.name} is {tensor.type.name}")
            yield _Entry(tensor, f"{module}.{kind or 'weight'}", "F32", tensor.shape, tensor.nbytes)
        else:
            shape = (math.prod(tensor.shape),) if kind == "bias" else tensor.shape  # biases of all experts are one
            if inner == "ffn_gate_inp_shexp" or ".moe_statics." in module:
                shape = (1, *shape)
            name = source.architecture.parameter_name(inner, layer, kind)
            width = 4 if source.dtype == "float32" else 2
            yield _Entry(tensor, name, _NAMES[source.dtype], shape, width * math.prod(shape))


def _mapped(path: Path, entries: list[_Entry]) -> mmap.mmap:
    """A new file of safetensors, mapped; its tensors are zero."""
    header, end = {}, 0
    for entry in entries:
        offsets = [end, end + entry.nbytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    with path.open("w+b") as file:
        if hasattr(os, "posix_fallocate"):  # on a full disk a mapped page that is written to ends the process
            os.posix_fallocate(file.fileno(), 0, 8 + len(text) + end)
        else:
            file.truncate(8 + len(text) + end)
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        return mmap.mmap(file.fileno(), 0)


def _write(source: GgufWeights, entry: _Entry, out: NDArray[numpy.uint8]) -> None:
    if entry.dtype == "U8":
        source.repack(entry.tensor, out.reshape(entry.shape))
        return
    if source.architecture.other_forms:
        out[:] = source.file.blocks(entry.tensor)
        return
    numbers: NDArray[Any] = source.numbers(entry.tensor, as_saved=True)
    if source.dtype == "bfloat16":
        numbers = (numbers.view(numpy.uint32) >> 16).astype(numpy.uint16)
    out[:] = numbers.reshape(-1).view(numpy.uint8)
