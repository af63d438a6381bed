"""Reads JSON Lines: one object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from h2o_stream.errors import DataError


def read_objects(path: Path, option: str) -> list[tuple[str, dict[str, Any]]]:
    """Every object of a file, with its place as ``file:line``; empty lines are passed over.

    Args:
        path: the file.
        option: which option named it.

    Raises:
        DataError: the file cannot be read or a line is not an object, naming file, line and what is wrong.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; {option} takes a JSON Lines file") from error
    places = ((f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip())
    return [(place, _parse(line, place)) for place, line in places]


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 at byte {error.start}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        what = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise DataError(f"{place}: not JSON: {what}") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: an object is needed, this is {type(record).__name__}")
    return record
