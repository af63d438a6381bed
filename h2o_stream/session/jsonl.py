"""Reads and writes JSON Lines: one object a line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from h2o_stream.errors import DataError
from h2o_stream.resources import replace_surrogates

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""How JSON writes what may be half a pair of surrogates: no text has it, and no tokenizer takes it."""


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


def to_json_line(record: Mapping[str, Any], encoding: str | None = "utf-8") -> str:
    """A record as a line. Letters that the encoding does not have, or none (halves of a pair), are escaped."""
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode(encoding or "ascii")
    except UnicodeEncodeError:
        line = json.dumps(record)
    return line + "\n"


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        text = line.decode("utf-8-sig")
        record = json.loads(text)
        if _SURROGATE.search(text):
            record = json.loads(replace_surrogates(json.dumps(record, ensure_ascii=False)))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 at byte {error.start}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        what = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise DataError(f"{place}: not JSON: {what}") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: an object is needed, this is {type(record).__name__}")
    return record
