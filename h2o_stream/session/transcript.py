"""What was said in a session: a file of JSON Lines that grows line by line.

It has a header and a line for each thing that happened, and every line is synced. This knows nothing of the states
that are kept beside it.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from h2o_stream.errors import DataError

Kind = Literal["said", "told", "pinned"]


@dataclass(frozen=True)
class Entry:
    """A turn of a transcript.

    Attributes:
        turn: its number.
        prompt: what the user said.
        text: what the model said.
        kind: ``said``, or fed without a reply being drawn: ``told`` again or ``pinned``.
        finish: why the reply ended.
        time: when, ISO 8601.
    """

    turn: int
    prompt: str
    text: str
    kind: Kind = "said"
    finish: str = "stop"
    time: str = ""


@dataclass(frozen=True)
class Header:
    """What a session belongs to.

    Attributes:
        model: name of the model.
        policy: of its cache.
        window: tokens it keeps; 0 for all.
        system: the system prompt, or None.
        created: ISO 8601.
    """

    model: str
    policy: str
    window: int
    system: str | None
    created: str = ""


@dataclass(frozen=True)
class _Lines:
    """What the lines of a transcript say; never changed, only replaced as a whole.

    Attributes:
        count: of the lines.
        header: of the conversation that was begun last.
        entries: its turns, less those that were taken back.
        numbers: of the lines of the entries, from 1.
    """

    count: int = 0
    header: Header | None = None
    entries: tuple[Entry, ...] = ()
    numbers: tuple[int, ...] = ()

    def and_then(self, record: Mapping[str, Any]) -> _Lines:
        """With one more.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: it is not one of a transcript.
        """
        kind, count = record["type"], self.count + 1
        if kind == "session":
            return _Lines(count, Header(**{field.name: record[field.name] for field in fields(Header)}))
        if kind == "turn":
            entry = Entry(**{field.name: record[field.name] for field in fields(Entry)})
            return _Lines(count, self.header, (*self.entries, entry), (*self.numbers, count))
        if kind == "undo":
            turn = int(record["turn"])
            rest = [pair for pair in zip(self.entries, self.numbers, strict=True) if pair[0].turn <= turn]
            return _Lines(count, self.header, tuple(e for e, _ in rest), tuple(number for _, number in rest))
        raise ValueError(kind)


class Transcript:
    """What a session's file says, and the file.

    Args:
        path: of the file; it is created with the first line.

    Raises:
        DataError: it cannot be read, or is not a transcript.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines, self._size = _Lines(), 0
        self._owed: tuple[bytes, ...] = ()
        if path.exists():
            self._read()

    @property
    def header(self) -> Header | None:
        """Of the conversation that was begun last."""
        return self._lines.header

    @property
    def entries(self) -> list[Entry]:
        """Its turns, less those that were taken back."""
        return list(self._lines.entries)

    @property
    def lines(self) -> int:
        """How many there are, those included that could not be written yet."""
        return self._lines.count

    @property
    def numbers(self) -> dict[int, int]:
        """The number of the line of each turn, by the turn."""
        return {entry.turn: number for entry, number in zip(self._lines.entries, self._lines.numbers, strict=True)}

    def _read(self) -> None:
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror or error}") from error
        self._size = data.rfind(b"\n") + 1  # a last line without its end was being written when the power went
        for number, line in enumerate(data[: self._size].splitlines(), 1):
            try:
                self._lines = self._lines.and_then(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise DataError(f"{self.path}: line {number} is not one of a transcript") from error
        if self.header is None and self.lines:
            raise DataError(f"{self.path}: the transcript has no header")

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a line and have it on the disk, with those that are owed; if that is cut off, nothing was added.

        Raises:
            DataError: the file cannot be written.
        """
        data, size = b"".join((*self._owed, _line(record))), self._size
        before, after = (self._lines, self._size, self._owed), (self._lines.and_then(record), size + len(data), ())
        try:
            with os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
                if os.fstat(file.fileno()).st_size < size:
                    raise OSError("the file was cut by another program")
                file.truncate(size)
                try:
                    file.seek(size)
                    if file.write(data) != len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(file.fileno())
                    self._lines, self._size, self._owed = after
                except BaseException:
                    self._lines, self._size, self._owed = before
                    with suppress(OSError):
                        file.truncate(size)
                    raise
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror or error}") from error

    def owe(self, record: Mapping[str, Any]) -> None:
        """Add a line that cannot be written now; it will be with the next."""
        self._lines, self._owed = self._lines.and_then(record), (*self._owed, _line(record))

    def replace(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add lines, all of them or none, even if the process is killed.

        Raises:
            DataError: the file cannot be written.
        """
        lines = self._lines
        for record in records:
            lines = lines.and_then(record)
        try:
            before = self.path.read_bytes()[: self._size] if self.path.exists() else b""
            data = b"".join((before, *self._owed, *map(_line, records)))
            write_whole(self.path, data)
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror or error}") from error
        self._lines, self._size, self._owed = lines, len(data), ()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there as a whole or as it was before.

    Raises:
        OSError: the disk is full, say.
    """
    unfinished = path.with_suffix(".part")
    try:
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def header_record(header: Header) -> dict[str, Any]:
    """A line that begins a conversation, now."""
    return {"type": "session", **asdict(header), "created": _now()}


def turn_record(entry: Entry) -> dict[str, Any]:
    """A line for a turn, of now unless it says when."""
    return {"type": "turn", **asdict(entry), "time": entry.time or _now()}


def _line(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
