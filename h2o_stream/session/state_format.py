"""States as safetensors, the format of files that torch writes and reads as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import BinaryIO

import numpy
from safetensors import SafetensorError, deserialize

from h2o_stream.base.safetensors_header import safetensors_header
from h2o_stream.cache.state import Array, State

_DTYPES = {
    "BF16": numpy.uint16,
    "BOOL": numpy.bool_,
    "F16": numpy.float16,
    "F32": numpy.float32,
    "F64": numpy.float64,
    "I16": numpy.int16,
    "I32": numpy.int32,
    "I64": numpy.int64,
    "I8": numpy.int8,
    "U8": numpy.uint8,
}
"""Numbers by their name in files."""

_NAMES = {numpy.dtype(kind): name for name, kind in _DTYPES.items()}

_ALIGNMENT = 8
"""Where the first array begins is a multiple of these bytes."""


def write_state(file: BinaryIO, state: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write a state, whose arrays are contiguous, and texts by name. No array is copied."""
    arrays = dict(sorted(state.items(), key=lambda item: -item[1].itemsize))  # so that all are aligned
    tensors = ((name, _NAMES[array.dtype], array.shape, array.nbytes) for name, array in arrays.items())
    header = safetensors_header(tensors, metadata, _ALIGNMENT)
    file.writelines([header, *(array.reshape(-1).data for array in arrays.values())])


def decode_state(data: bytes) -> State:
    """The state in a file's content; raises SafetensorError if it is damaged, or holds numbers that no state has."""
    state = State()
    for name, tensor in deserialize(data):
        if tensor["dtype"] not in _DTYPES:
            raise SafetensorError(f"{name} is {tensor['dtype']}")
        state[name] = numpy.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    return state
