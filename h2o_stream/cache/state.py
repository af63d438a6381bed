"""A cache as a dictionary of tensors, ready for safetensors, and the fingerprint that says what it belongs to."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from h2o_stream.errors import H2OStreamError, means_out_of_memory

FINGERPRINT = "fingerprint"
CHECKSUMS = "checksums"


def checksummed(state: dict[str, Tensor], name: str = CHECKSUMS) -> dict[str, Tensor]:
    """The state, and under `name` a CRC-32 of each of its other tensors."""
    return state | {name: encode_json({key: _crc(tensor) for key, tensor in state.items() if key != name})}


def verify_checksums(state: Mapping[str, Tensor], name: str = CHECKSUMS) -> None:
    """Compare every tensor that `checksummed` saw with its checksum; others in the state are not looked at.

    Raises:
        H2OStreamError: a tensor is missing or damaged, or there are no checksums.
    """
    if name not in state:
        raise H2OStreamError("the state has no checksums: an older version saved it, or it is incomplete")
    for key, crc in decode_json(state, name).items():
        if not isinstance(state.get(key), Tensor) or _crc(state[key]) != crc:
            raise H2OStreamError(f"the state is damaged: {key} is missing or not what was saved")


def check_saveable(torn: bool, seen_tokens: int) -> None:
    """Whether a cache has a state.

    Raises:
        H2OStreamError: it is empty, or the last forward was cut off halfway.
    """
    if torn:
        raise H2OStreamError("the last forward was cut off halfway: there is no state to save")
    if not seen_tokens:
        raise H2OStreamError("the cache is empty: there is no state to save")


@contextmanager
def refusing_damage() -> Iterator[None]:
    """Turn whatever goes wrong inside the block, where a state is read, into a line.

    Raises:
        H2OStreamError: something went wrong, but for a lack of memory.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if means_out_of_memory(error):
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise H2OStreamError(f"the state is damaged: {reason}") from error


def _crc(tensor: Tensor) -> int:
    """Of dtype, shape and bytes."""
    header = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    whole = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return zlib.crc32(whole.numpy().data, zlib.crc32(header))


def encode_json(fingerprint: Mapping[str, Any]) -> Tensor:
    """A JSON object as its bytes, uint8."""
    return torch.tensor(list(json.dumps(fingerprint, sort_keys=True).encode()), dtype=torch.uint8)


def decode_json(state: Mapping[str, Tensor], name: str) -> dict[str, Any]:
    """What `encode_json` made a tensor of.

    Raises:
        H2OStreamError: it is missing or damaged.
    """
    try:
        told = json.loads(bytes(state[name].tolist()))
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise H2OStreamError(f"this is not the state of a cache: its {name} is missing or damaged") from error
    if not isinstance(told, dict):
        raise H2OStreamError(f"the state is damaged: its {name} is no object")
    return told


def check_fingerprint(state: Mapping[str, Tensor], fingerprint: Mapping[str, Any]) -> None:
    """Compare the fingerprint inside a state with the one of this cache.

    Raises:
        H2OStreamError: it is missing, or names another model, dtype or policy.
    """
    theirs = decode_json(state, FINGERPRINT)
    ours = json.loads(json.dumps(fingerprint))
    for name, value in ours.items():
        if theirs.get(name) != value:
            raise H2OStreamError(f"the state belongs to another {name}: {theirs.get(name)}, and this is {value}")


def within(state: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """The tensors of one numbered part of a state, by their names in it."""
    prefix = f"{number}."
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def whole_numbers(state: Mapping[str, Tensor], name: str, count: int | None = None) -> list[int]:
    """A tensor of whole numbers [count] from 0 up to 2**31.

    Raises:
        H2OStreamError: it is missing or no such thing.
    """
    tensor = require_tensor(state, name)
    if tensor.dtype != torch.int64 or tensor.dim() != 1 or len(tensor) != (len(tensor) if count is None else count):
        raise H2OStreamError(f"the state is damaged: {name} is {tuple(tensor.shape)} {tensor.dtype}")
    numbers: list[int] = tensor.tolist()
    if not all(0 <= number < 2**31 for number in numbers):
        raise H2OStreamError(f"the state is damaged: {name} is {numbers}")
    return numbers


def require_tensor(state: Mapping[str, Tensor], name: str, like: Tensor | None = None) -> Tensor:
    """One tensor of a state, on the device of `like` and checked to be of its shape and type.

    Raises:
        H2OStreamError: it is missing or does not fit.
    """
    tensor = state.get(name)
    if not isinstance(tensor, Tensor):
        raise H2OStreamError(f"the state is incomplete: {name} is missing")
    if like is None:
        return tensor
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise H2OStreamError(
            f"the state does not fit: {name} is {tuple(tensor.shape)} {tensor.dtype}, "
            f"{tuple(like.shape)} {like.dtype} is needed"
        )
    return tensor.to(like.device, copy=True)
