"""Parses the header of a GGUF file.

Every count, length and offset is checked against the file size before it is used.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from mmap import mmap
from typing import Any

from h2o_stream.native.gguf_types import BLOCKS, TensorType, ValueType

VERSIONS = (2, 3)
_ALIGNMENT = 32  # default of general.alignment
_ALIGNMENTS = tuple(8 << i for i in range(14))
_MAX_DIMS = 4
_MAX_KEYS = _MAX_TENSORS = 1 << 16
_MAX_NAME = (1 << 16) - 1
_MAX_STRING = 1 << 24
_MAX_ITEMS = 1 << 24
_MAX_PARSED_ITEMS = 4096
_MIN_KEY_BYTES = 8 + 4 + 1  # an empty name, a type, one byte
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

_LENGTH = struct.Struct("<Q")
_FORMATS = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's location: shape in torch's order, rows first, bytes from the start of its file, number of the file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    part: int = 0


@dataclass(frozen=True)
class SkippedArray:
    """A long array in the metadata that was not parsed, such as the vocabulary, and where its items start."""

    type: ValueType
    count: int
    offset: int


class DamagedError(Exception):
    """The file is inconsistent; the message gives the numbers."""


class UnknownTypeError(Exception):
    """The type of a tensor is unknown."""


class Header:
    """Parser of a header; `_offset` is the next byte to read."""

    def __init__(self, data: mmap, size: int) -> None:
        self._data, self._size, self._offset = data, size, 4
        version = self._number("I", "the version")
        if version not in VERSIONS:
            if version & 0xFFFF == 0:
                raise DamagedError("it is big-endian")
            raise DamagedError(f"its version is {version}, not 2 or 3")
        self._num_tensors = self._count(_MAX_TENSORS, _MIN_TENSOR_BYTES, "tensors")
        self._num_keys = self._count(_MAX_KEYS, _MIN_KEY_BYTES, "keys")

    def metadata(self) -> dict[str, Any]:
        """Values by key."""
        values: dict[str, Any] = {}
        for index in range(self._num_keys):
            key = self._string(_MAX_NAME, f"key {index}")
            if key in values:
                raise DamagedError(f"key {key} is duplicated")
            values[key] = self._value(key)
        return values

    def tensors(self, alignment: int) -> dict[str, GgufTensor]:
        """Tensors by name."""
        infos = [self._tensor(index) for index in range(self._num_tensors)]
        start = -(-self._offset // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in infos:
            tensor = GgufTensor(name, kind, shape, start + offset, _nbytes(name, kind, shape))
            if name in tensors:
                raise DamagedError(f"tensor {name} is duplicated")
            if offset % alignment:
                raise DamagedError(f"tensor {name} is at {offset}, not a multiple of {alignment}")
            if tensor.offset + tensor.nbytes > self._size:
                raise DamagedError(
                    f"tensor {name} has {tensor.nbytes} bytes from {tensor.offset} on, the file ends at {self._size}"
                )
            tensors[name] = tensor
        _check_no_overlap(tensors.values())
        return tensors

    def _tensor(self, index: int) -> tuple[str, TensorType, tuple[int, ...], int]:
        name = self._string(_MAX_NAME, f"the name of tensor {index}")
        count = self._number("I", f"the dimensions of {name}")
        if not 1 <= count <= _MAX_DIMS:
            raise DamagedError(f"tensor {name} has {count} dimensions, not 1 to {_MAX_DIMS}")
        dims = [self._number("Q", f"the dimensions of {name}") for _ in range(count)]
        number = self._number("I", f"the type of {name}")
        try:
            kind = TensorType(number)
        except ValueError:
            raise UnknownTypeError(f"tensor {name} has type {number}, which is unknown") from None
        return name, kind, tuple(reversed(dims)), self._number("Q", f"the offset of {name}")

    def _value(self, key: str) -> Any:
        kind = self._type(key)
        if kind == ValueType.STRING:
            return self._string(_MAX_STRING, key)
        return self._array(key) if kind == ValueType.ARRAY else self._number(_FORMATS[kind], key)

    def _array(self, key: str) -> Any:
        kind = self._type(key)
        if kind == ValueType.ARRAY:
            raise DamagedError(f"{key} is an array of arrays")
        if kind == ValueType.STRING:
            count = self._count(_MAX_ITEMS, _LENGTH.size, f"strings in {key}")
            array = SkippedArray(kind, count, self._offset)
            self._skip_strings(count, key)
            return array
        width = struct.calcsize(f"<{_FORMATS[kind]}")
        count = self._count(_MAX_ITEMS, width, f"values in {key}")
        array = SkippedArray(kind, count, self._advance(count * width, key))
        return array if count > _MAX_PARSED_ITEMS else read_array(self._data, array)

    def _skip_strings(self, count: int, key: str) -> None:
        data, at, last, unpack = self._data, self._offset, self._size - _LENGTH.size, _LENGTH.unpack_from
        for index in range(count):
            if at > last:
                raise DamagedError(f"string {index} of {count} in {key} is at {at}, the file ends at {self._size}")
            at += _LENGTH.size + unpack(data, at)[0]
        self._offset = at
        self._advance(0, key)

    def _type(self, key: str) -> ValueType:
        number = self._number("I", f"the type of {key}")
        try:
            return ValueType(number)
        except ValueError:
            raise DamagedError(f"{key} is a value of type {number}, which is unknown") from None

    def _string(self, max_length: int, what: str) -> str:
        length = self._number("Q", f"the length of {what}")
        if length > max_length:
            raise DamagedError(f"{what} is a string of {length} bytes, more than {max_length}")
        if not length and max_length == _MAX_NAME:
            raise DamagedError(f"{what} is empty")
        start = self._advance(length, what)
        try:
            return self._data[start : self._offset].decode()
        except UnicodeDecodeError as error:
            raise DamagedError(f"{what} is not UTF-8 at byte {start + error.start}") from None

    def _count(self, limit: int, width: int, what: str) -> int:
        """Read a number of items that take at least `width` bytes each."""
        count: int = self._number("Q", f"the number of {what}")
        if count > limit:
            raise DamagedError(f"it has {count} {what}, more than {limit}")
        if count * width > self._size - self._offset:
            raise DamagedError(f"{count} {what} do not fit into {self._size - self._offset} bytes")
        return count

    def _number(self, code: str, what: str) -> Any:
        values = struct.Struct(f"<{code}")
        return values.unpack_from(self._data, self._advance(values.size, what))[0]

    def _advance(self, count: int, what: str) -> int:
        """Skip `count` bytes and return where they start."""
        start = self._offset
        if count > self._size - start:
            raise DamagedError(f"{what} ends at {start + count}, the file at {self._size}")
        self._offset = start + count
        return start


def read_array(data: mmap, array: SkippedArray) -> list[Any]:
    """The items of an array that a `Header` has skipped; raises DamagedError if a string is not UTF-8."""
    if array.type != ValueType.STRING:
        return list(struct.unpack_from(f"<{array.count}{_FORMATS[array.type]}", data, array.offset))
    at, unpack, strings = array.offset, _LENGTH.unpack_from, list[str]()
    try:
        for _ in range(array.count):
            start = at + _LENGTH.size
            at = start + unpack(data, at)[0]
            strings.append(data[start:at].decode())
    except UnicodeDecodeError as error:
        raise DamagedError(f"string {len(strings)} is not UTF-8 at byte {start + error.start}") from None
    return strings


def _nbytes(name: str, kind: TensorType, shape: tuple[int, ...]) -> int:
    block, width = BLOCKS[kind]
    if not all(shape):
        raise DamagedError(f"tensor {name} has the shape {shape}")
    if shape[-1] % block:
        raise DamagedError(f"tensor {name} has rows of {shape[-1]} numbers, not of whole blocks of {block}")
    return math.prod(shape) // block * width


def _check_no_overlap(tensors: Iterable[GgufTensor]) -> None:
    ordered = sorted(tensors, key=lambda tensor: tensor.offset)
    for first, second in itertools.pairwise(ordered):
        if second.offset < first.offset + first.nbytes:
            raise DamagedError(
                f"tensor {second.name} starts at {second.offset}, {first.name} ends at {first.offset + first.nbytes}"
            )


def architecture_of(metadata: dict[str, Any]) -> str:
    """llama.cpp's name of the architecture."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or not name:
        raise DamagedError(f"general.architecture is {name!r}, not a name")
    return name


def alignment_of(metadata: dict[str, Any]) -> int:
    """Alignment of every tensor, in bytes."""
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment not in _ALIGNMENTS:
        raise DamagedError(f"general.alignment is {alignment!r}, not a power of 2 from 8 to {_ALIGNMENTS[-1]}")
    return alignment
