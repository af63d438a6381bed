"""Reads and writes JSON Lines: one object per line."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Self, TextIO, TypeVar, get_args, get_origin, get_type_hints

from h2o_stream.base.json_text import parse_json
from h2o_stream.base.resources import replace_surrogates
from h2o_stream.errors import DataError, file_errors

T = TypeVar("T")

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""A JSON escape that may be an unpaired surrogate, which tokenizers reject."""

_MAX_NUMBER = 1 << 53
"""JSON numbers above this are not exact."""


class JsonlWriter:
    """Writes records to a file and flushes each one, so that an interrupted run keeps its records.

    ``-`` is standard output, None nothing.

    Raises:
        DataError: the file cannot be opened.
    """

    def __init__(self, target: str | Path | None) -> None:
        self._file: TextIO | None = None
        self._place, self._is_stdout = f"--jsonl {target}", target == "-"
        if self._is_stdout:
            self._file = sys.stdout
        elif target is not None:
            with file_errors(self._place):
                self._file = Path(target).open("w", encoding="utf-8")  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None and not self._is_stdout:
            with suppress(OSError):  # every record was flushed, so this error was already reported
                self._file.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record; raises DataError if the file cannot be written, for example because the disk is full."""
        if self._file is None:
            return
        with file_errors(self._place):
            self._file.write(to_json_line(record, self._file.encoding))
            self._file.flush()


def to_json_line(record: Mapping[str, Any], encoding: str | None = "utf-8") -> str:
    """A record as a line. If the encoding cannot represent it, all non-ASCII characters are escaped."""
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode(encoding or "ascii")
    except UnicodeEncodeError:
        line = json.dumps(record)
    return line + "\n"


def jsonl_text(records: Iterable[Mapping[str, Any]]) -> str:
    """JSON Lines."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def read_objects(path: Path, option: str) -> list[tuple[str, dict[str, Any]]]:
    """Every object of a file, with its place as ``file:line``. Empty lines are skipped. Errors name `option`.

    Raises:
        DataError: the file cannot be read, or a line is not an object.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; {option} takes a JSON Lines file") from error
    places = ((f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip())
    return [(place, _parse(line, place)) for place, line in places]


def build(cls: type[T], fields: Mapping[str, Any], **built: Any) -> T:
    """A dataclass instance from JSON fields, each checked against its type, and from others that are not checked.

    Raises:
        ValueError, TypeError, KeyError: a field is missing, unknown or of another type.
    """
    types = _types(cls)  # type: ignore[arg-type]
    return cls(**{name: check_type(value, types[name]) for name, value in fields.items()}, **built)


@cache
def _types(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def check_type(value: Any, expected: Any) -> Any:
    """A value read from JSON, or ValueError if it has another type, or is not finite, exact and not negative."""
    allowed = get_args(expected)
    if get_origin(expected) is Literal:
        fits = value in allowed
    elif isinstance(expected, UnionType):
        fits = type(value) in allowed
    elif expected in (int, float):
        fits = type(value) in (int, expected) and 0 <= value < _MAX_NUMBER
    else:
        fits = type(value) is expected
    if not fits:
        raise ValueError(value)
    return value


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        text = line.decode("utf-8-sig")
        record = parse_json(text)
        if _SURROGATE.search(text):
            record = json.loads(replace_surrogates(json.dumps(record, ensure_ascii=False)))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 at byte {error.start}") from error
    except ValueError as error:  # also of a number of thousands of digits
        raise DataError(f"{place}: not JSON: {getattr(error, 'msg', error)}") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: expected an object, got {type(record).__name__}")
    return record
