"""The safetensors files of checkpoints, mapped; numbers in bfloat16 are uint16."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream.base.json_text import parse_json
from h2o_stream.errors import DataError
from h2o_stream.models.packed_cache import WEIGHTS_FILE
from h2o_stream.models.pages import map_weights
from h2o_stream.native.matrix import DescriptionError

_DTYPES = {"U8": numpy.uint8, "F32": numpy.float32, "BF16": numpy.uint16, "F16": numpy.float16}
"""Dtypes of the tensors of checkpoints, by safetensors' names."""


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint.

    Raises:
        DescriptionError: there are none, or one is missing.
        DataError: the index names something else than files of the folder.
    """
    index = folder / f"{WEIGHTS_FILE}.index.json"
    try:
        names = {*parse_json(index.read_text())["weight_map"].values()} if index.exists() else {WEIGHTS_FILE}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DescriptionError(f"{index} is damaged") from error
    for name in names:
        if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
            raise DataError(f"{index} names {str(name)[:60]!r}, which is no file of its folder")
    paths = [folder / name for name in sorted(names)]
    if not all(path.is_file() for path in paths):
        raise DescriptionError(f"{folder} has no {WEIGHTS_FILE}, or not all of its parts")
    return paths


def mapped_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors of a safetensors file by name, as views of the mapped file; bfloat16 numbers are uint16.

    Those at addresses that numbers of their size cannot have are copied.

    Raises:
        DescriptionError: the file is damaged, or has other dtypes.
    """
    try:
        data = map_weights(path)
        size = 8 + int.from_bytes(data[:8], "little")
        header = parse_json(data[8:size])
        views = {
            name: numpy.frombuffer(
                data, _DTYPES[entry["dtype"]], math.prod(entry["shape"]), size + entry["data_offsets"][0]
            ).reshape(entry["shape"])
            for name, entry in header.items()
            if name != "__metadata__"
        }
        return {name: view if view.flags.aligned else view.copy() for name, view in views.items()}
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise DescriptionError(f"{path} is damaged: {error}") from error
