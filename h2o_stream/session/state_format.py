"""States as safetensors, the format of files that torch writes and reads as well."""

from __future__ import annotations

from collections.abc import Mapping

import numpy
from safetensors import SafetensorError, TensorSpec, deserialize, serialize

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


def encode_state(state: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    """The content of a file with a state, whose arrays are contiguous, and with texts by name."""
    specs = {
        name: TensorSpec(
            dtype="bfloat16" if array.dtype == numpy.uint16 else array.dtype.name,
            shape=array.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in state.items()
    }
    return serialize(specs, dict(metadata))


def decode_state(data: bytes) -> State:
    """The state in a file's content.

    Raises:
        SafetensorError: it is damaged, or holds numbers that no state has.
    """
    state = State()
    for name, tensor in deserialize(data):
        if tensor["dtype"] not in _DTYPES:
            raise SafetensorError(f"{name} is {tensor['dtype']}")
        state[name] = numpy.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    return state
