"""States as dictionaries of numpy arrays: checksums, fingerprints and checked access.

Numbers in bfloat16 are uint16 arrays, as nothing else is.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream.base.json_text import parse_json
from h2o_stream.base.logs import NumberLog
from h2o_stream.errors import H2OStreamError, means_out_of_memory

Array = NDArray[Any]
State = dict[str, Array]

FINGERPRINT = "fingerprint"
CHECKSUMS = "checksums"

MARKS = ".marks"
"""What follows the name of a log in that of the array [n, 2] with its marks."""


def checksummed(state: State, name: str = CHECKSUMS) -> State:
    """The state, plus a CRC-32 of each of its other arrays under `name`."""
    return state | {name: encode_json({key: _crc(array) for key, array in state.items() if key != name})}


def verify_checksums(state: Mapping[str, Array], name: str = CHECKSUMS) -> None:
    """Raise H2OStreamError if an array that `checksummed` saw is missing or damaged, or there are no checksums."""
    if name not in state:
        raise H2OStreamError("the state has no checksums: an older version saved it, or it is incomplete")
    for key, crc in decode_json(state, name).items():
        if not isinstance(state.get(key), numpy.ndarray) or _crc(state[key]) != crc:
            raise H2OStreamError(f"the state is damaged: {key} is missing or not what was saved")


def check_saveable(torn: bool, seen_tokens: int) -> None:
    """Raise H2OStreamError if a cache has no state: it is empty, or the last forward was cut off halfway."""
    if torn:
        raise H2OStreamError("the last forward was cut off halfway: there is no state to save")
    if not seen_tokens:
        raise H2OStreamError("the cache is empty: there is no state to save")


@contextmanager
def refusing_damage() -> Iterator[None]:
    """Turn any error while a state is read, but for a lack of memory, into the one line of an H2OStreamError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if means_out_of_memory(error):
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise H2OStreamError(f"the state is damaged: {reason}") from error


def _crc(array: Array) -> int:
    """Checksum of dtype, shape and bytes."""
    return zlib.crc32(numpy.ascontiguousarray(array).data, zlib.crc32(f"{dtype_of(array)} {array.shape}".encode()))


def dtype_of(array: Array) -> str:
    """The dtype as torch writes it, which states always did: "torch.bfloat16" for example."""
    return _dtype_name(array.dtype)


@cache
def _dtype_name(dtype: numpy.dtype[Any]) -> str:
    return f"torch.{'bfloat16' if dtype == numpy.uint16 else dtype.name}"  # numpy takes long to compose a name


def encode_json(values: Mapping[str, Any]) -> Array:
    """A JSON object as a uint8 array."""
    return numpy.frombuffer(bytearray(json.dumps(values, sort_keys=True).encode()), numpy.uint8)


def decode_json(state: Mapping[str, Array], name: str) -> dict[str, Any]:
    """The object that `encode_json` encoded as array `name`; raises H2OStreamError if it is missing or damaged."""
    try:
        decoded = parse_json(state[name].tobytes())
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise H2OStreamError(f"this is not the state of a cache: its {name} is missing or damaged") from error
    if not isinstance(decoded, dict):
        raise H2OStreamError(f"the state is damaged: its {name} is no object")
    return decoded


def check_fingerprint(state: Mapping[str, Array], fingerprint: Mapping[str, Any]) -> None:
    """Raise H2OStreamError if a state has no fingerprint, or that of another model, dtype or policy than this cache."""
    theirs = decode_json(state, FINGERPRINT)
    ours = json.loads(json.dumps(fingerprint))
    for name, value in ours.items():
        if theirs.get(name) != value:
            raise H2OStreamError(f"the state belongs to another {name}: {theirs.get(name)}, and this is {value}")


def log_state(name: str, log: NumberLog) -> State:
    """A log, whose end is marked, as arrays. They share its memory."""
    return {name: log.array, name + MARKS: numpy.array(log.marks, numpy.int64).reshape(-1, 2)}


def logs_of(state: Mapping[str, Array]) -> list[str]:
    """The names of the logs in a state."""
    return [name.removesuffix(MARKS) for name in state if name.endswith(MARKS)]


def load_log(state: Mapping[str, Array], name: str) -> NumberLog:
    """A log from the arrays of `log_state`; raises H2OStreamError if they are missing or damaged."""
    array, marks = require_array(state, name), state.get(name + MARKS)
    if marks is None:  # earlier versions: the array is among those with checksums
        return NumberLog(array)
    length, crc = (0, 0) if not len(marks) else marks[-1].tolist()
    if array.dtype != numpy.int32 or len(array) != length or zlib.crc32(array.data, 0) != crc:
        raise H2OStreamError(f"the state is damaged: {name} is not what was saved")
    return NumberLog(array, list(map(tuple, marks.tolist())))


def with_prefix(state: Mapping[str, Array], prefix: str) -> State:
    """The arrays whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}


def whole_numbers(state: Mapping[str, Array], name: str, count: int | None = None) -> list[int]:
    """The numbers of an int64 array [count], all from 0 up to 2**31; raises H2OStreamError if there is none."""
    array = require_array(state, name)
    if array.dtype != numpy.int64 or array.ndim != 1 or len(array) != (len(array) if count is None else count):
        raise H2OStreamError(f"the state is damaged: {name} is {array.shape} {dtype_of(array)}")
    values: list[int] = array.tolist()
    if not all(0 <= number < 2**31 for number in values):
        raise H2OStreamError(f"the state is damaged: {name} is {values}")
    return values


def require_array(state: Mapping[str, Array], name: str, like: Array | None = None) -> Array:
    """One array of a state, with the shape and dtype of `like`; raises H2OStreamError if it is missing or another."""
    array = state.get(name)
    if not isinstance(array, numpy.ndarray):
        raise H2OStreamError(f"the state is incomplete: {name} is missing")
    if like is not None and (array.shape != like.shape or array.dtype != like.dtype):
        raise H2OStreamError(
            f"the state does not fit: {name} is {array.shape} {dtype_of(array)}, "
            f"{like.shape} {dtype_of(like)} is needed"
        )
    return array
