"""What happened in a run, with its times, as JSON Lines: to be shown again without the model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from h2o_stream.cache.counts import CacheCounts
from h2o_stream.engine.events import PrefillProgress, Token
from h2o_stream.errors import DataError
from h2o_stream.session.lines import to_json_line
from h2o_stream.session.turn import Turn
from h2o_stream.session.work import Work

T = TypeVar("T")

_LARGEST = 1 << 53
"""Above it JSON's numbers are not exact."""


@dataclass(frozen=True)
class Asked:
    """A turn begins."""

    title: str
    prompt: str


class Recorder:
    """Writes what it is told into a file, or nowhere. A context manager.

    Args:
        path: the file; None for none.
        title: of the run.

    Raises:
        DataError: the file is there already, or cannot be written.
    """

    def __init__(self, path: Path | None, title: str) -> None:
        self._path = path
        self._begun = time.monotonic()
        self._file = None
        if path is not None:
            try:
                self._file = path.open("x", encoding="utf-8")
            except OSError as error:
                raise DataError(f"--record {path}: {error.strerror or error}") from error
            self._write("run", {"title": title})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()

    def asked(self, title: str, prompt: str) -> None:
        """A turn begins."""
        self._write("asked", {"title": title, "prompt": prompt})

    def event(self, event: PrefillProgress | Token | Turn) -> None:
        """Something happened in the turn."""
        if self._file is None:
            return
        if isinstance(event, Token):
            told = {"id": event.id, "text": event.text, "elapsed_s": event.elapsed_s, "counts": asdict(event.counts)}
            self._write("token", told)
        else:
            self._write("prefill" if isinstance(event, PrefillProgress) else "turn", asdict(event))

    def _write(self, kind: str, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        line = {"type": kind, "at_s": round(time.monotonic() - self._begun, 4), **record}
        try:
            self._file.write(to_json_line(line))
            self._file.flush()
        except OSError as error:
            raise DataError(f"--record {self._path}: {error.strerror or error}") from error


def recorded(path: Path) -> tuple[str, Iterator[tuple[float, Asked | PrefillProgress | Token | Turn]]]:
    """The title of a recording, and what happened with the seconds since it began.

    Raises:
        DataError: the file cannot be read, or is no recording; also while it is read.
    """
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")  # text may have other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--replay {path}: {getattr(error, 'strerror', None) or error}") from error
    parsed = (_parsed(path, number, line) for number, line in enumerate(lines, 1))
    first = next(parsed, None)
    if first is None or not isinstance(first[1], str):
        raise DataError(f"--replay {path}: this is not a recording, its first line has no title")
    return first[1], parsed


def _parsed(path: Path, number: int, line: str) -> tuple[float, Any]:
    try:
        told = json.loads(line)
        return _checked(told.pop("at_s"), float), _event(told.pop("type"), told)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"--replay {path}: line {number} is not one of a recording") from error


def _event(kind: str, told: dict[str, Any]) -> Any:
    if kind == "run":
        return _checked(told["title"], str)
    if kind == "asked":
        return Asked(_checked(told["title"], str), _checked(told["prompt"], str))
    counts = _build(CacheCounts, told.pop("counts"))
    if kind == "prefill":
        return _build(PrefillProgress, told, counts=counts)
    if kind == "token":
        return _build(Token, told, seen=counts.seen, count=lambda: counts)
    if kind == "turn":
        return _build(Turn, told, work=_build(Work, told.pop("work")), counts=counts)
    raise ValueError(kind)


def _build(kind: type[T], told: dict[str, Any], **more: Any) -> T:
    """An object of its fields as they were written, and of those that were made already."""
    types = get_type_hints(kind, localns={"CacheCounts": CacheCounts})
    return kind(**{name: _checked(value, types[name]) for name, value in told.items()}, **more)


def _checked(value: Any, kind: Any) -> Any:
    """A value of a recording; a number is finite, not negative and no larger than any that is written."""
    if get_origin(kind) is Literal:
        fits = value in get_args(kind)
    elif kind in (int, float):
        fits = type(value) in (int, kind) and 0 <= value < _LARGEST
    else:
        fits = type(value) is kind
    if not fits:
        raise ValueError(value)
    return value
