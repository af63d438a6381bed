"""States as dictionaries of tensors, ready for safetensors: checksums, fingerprints and checked access."""

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
    """The state, plus a CRC-32 of each of its other tensors under `name`."""
    return state | {name: encode_json({key: _crc(tensor) for key, tensor in state.items() if key != name})}


def verify_checksums(state: Mapping[str, Tensor], name: str = CHECKSUMS) -> None:
    """Compare every tensor that `checksummed` saw with its checksum; others are ignored.

    Raises:
        H2OStreamError: a tensor is missing or damaged, or there are no checksums.
    """
    if name not in state:
        raise H2OStreamError("the state has no checksums: an older version saved it, or it is incomplete")
    for key, crc in decode_json(state, name).items():
        if not isinstance(state.get(key), Tensor) or _crc(state[key]) != crc:
            raise H2OStreamError(f"the state is damaged: {key} is missing or not what was saved")


def check_saveable(torn: bool, seen_tokens: int) -> None:
    """Check that a cache has a state.

    Raises:
        H2OStreamError: it is empty, or the last forward was cut off halfway.
    """
    if torn:
        raise H2OStreamError("the last forward was cut off halfway: there is no state to save")
    if not seen_tokens:
        raise H2OStreamError("the cache is empty: there is no state to save")


@contextmanager
def refusing_damage() -> Iterator[None]:
    """Turn any error while a state is read into one line.

    Raises:
        H2OStreamError: something other than a lack of memory went wrong.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if means_out_of_memory(error):
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise H2OStreamError(f"the state is damaged: {reason}") from error


def _crc(tensor: Tensor) -> int:
    """Checksum of dtype, shape and bytes."""
    header = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return zlib.crc32(data.numpy().data, zlib.crc32(header))


def encode_json(fingerprint: Mapping[str, Any]) -> Tensor:
    """A JSON object as a uint8 tensor."""
    return torch.tensor(list(json.dumps(fingerprint, sort_keys=True).encode()), dtype=torch.uint8, device="cpu")


def decode_json(state: Mapping[str, Tensor], name: str) -> dict[str, Any]:
    """The object that `encode_json` encoded as tensor `name`.

    Raises:
        H2OStreamError: it is missing or damaged.
    """
    try:
        decoded = json.loads(bytes(state[name].tolist()))
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise H2OStreamError(f"this is not the state of a cache: its {name} is missing or damaged") from error
    if not isinstance(decoded, dict):
        raise H2OStreamError(f"the state is damaged: its {name} is no object")
    return decoded


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


def with_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def whole_numbers(state: Mapping[str, Tensor], name: str, count: int | None = None) -> list[int]:
    """The numbers of an int64 tensor [count], all from 0 up to 2**31.

    Raises:
        H2OStreamError: it is missing or not such a tensor.
    """
    tensor = require_tensor(state, name)
    if tensor.dtype != torch.int64 or tensor.dim() != 1 or len(tensor) != (len(tensor) if count is None else count):
        raise H2OStreamError(f"the state is damaged: {name} is {tuple(tensor.shape)} {tensor.dtype}")
    numbers: list[int] = tensor.tolist()
    if not all(0 <= number < 2**31 for number in numbers):
        raise H2OStreamError(f"the state is damaged: {name} is {numbers}")
    return numbers


def require_tensor(state: Mapping[str, Tensor], name: str, like: Tensor | None = None) -> Tensor:
    """One tensor of a state; with `like`, a copy on its device, checked to have its shape and dtype.

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
