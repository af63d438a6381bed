"""What files of safetensors begin with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def safetensors_header(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str], alignment: int
) -> bytes:
    """All bytes before the data.

    Args:
        tensors: name, dtype as the format calls it, shape and size in bytes of each, in the order of the data.
        metadata: texts by name.
        alignment: the data begin at a multiple of it.
    """
    header, end = dict[str, Any](__metadata__=dict(metadata)), 0
    for name, dtype, shape, nbytes in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + nbytes)}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text
