"""The transcript of a session: a JSON Lines file with a header and one line per turn or undo; and its export.

Every line is synced to disk. This module knows nothing of the states that are saved beside the transcript.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeGuard

from h2o_stream.base.json_text import parse_json
from h2o_stream.base.logs import Log
from h2o_stream.base.resources import PRIVATE, write_atomically
from h2o_stream.errors import ConfigError, DataError, file_errors
from h2o_stream.recall.passage import SaidTurn
from h2o_stream.session.jsonl import build, check_type

Kind = Literal["said", "told", "pinned"]

_TURN = attrgetter("turn")

_TAIL_BYTES = 4096


@dataclass(frozen=True)
class Entry:
    """A turn of a transcript.

    Attributes:
        kind: ``said`` if the reply was generated, ``told`` if it was fed, ``pinned`` for a pinned text.
        time: ISO 8601.
    """

    turn: int
    prompt: str
    text: str
    kind: Kind = "said"
    finish: str = "stop"
    time: str = ""
    thinking: str = ""


class SaidTurns(Sequence[SaidTurn]):
    """A view of transcript entries as recall's turns; it converts an entry only when it is read."""

    def __init__(self, entries: Sequence[Entry], later: Sequence[Entry] = ()) -> None:
        self._entries, self._later = entries, later

    def __len__(self) -> int:
        return len(self._entries) + len(self._later)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index] - len(self._entries)
        entry = self._later[place] if place >= 0 else self._entries[place]
        return entry.turn, entry.prompt, entry.text


@dataclass(frozen=True)
class Header:
    """What a session was created with. A window of 0 keeps all; the time is ISO 8601."""

    model: str
    policy: str
    window: int
    system: str | None
    created: str = ""


@dataclass(frozen=True)
class _Content:
    """The content of a transcript; never changed, only replaced as a whole. See `Transcript`."""

    line_count: int = 0
    header: Header | None = None
    entries: Log[Entry] = field(default_factory=Log)
    line_numbers: Log[int] = field(default_factory=Log)

    def with_record(self, record: Mapping[str, Any]) -> _Content:
        """A copy with one more line."""
        kind, count = record["type"], self.line_count + 1
        if kind == "session":
            return _Content(count, build(Header, {field.name: record[field.name] for field in fields(Header)}))
        if kind == "turn":
            record = {"thinking": "", **record}  # only turns that have any write it
            entry = build(Entry, {field.name: record[field.name] for field in fields(Entry)})
            return _Content(count, self.header, self.entries.append(entry), self.line_numbers.append(count))
        if kind == "undo":
            turn = check_type(record["turn"], int)
            entries = self.entries.upto(turn, _TURN)
            return _Content(count, self.header, entries, self.line_numbers.first(len(entries)))
        raise ValueError(kind)


class Transcript:
    """A transcript and its file, which the first line creates; raises DataError if it is no readable transcript."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content, self._size = _Content(), 0
        self._deferred: tuple[bytes, ...] = ()
        if path.exists():
            self._read()

    @property
    def header(self) -> Header | None:
        """The header of the conversation that was started last."""
        return self._content.header

    @property
    def entries(self) -> Log[Entry]:
        """Its turns, without those that were undone."""
        return self._content.entries

    @property
    def line_count(self) -> int:
        """The number of lines, including those that could not be written yet."""
        return self._content.line_count

    @property
    def line_numbers(self) -> Log[int]:
        """The line number of each of them."""
        return self._content.line_numbers

    def line_of(self, turn: int) -> int:
        """The line number of a turn; 0 if there is none."""
        place = len(self.entries.upto(turn, _TURN)) - 1
        return self.line_numbers[place] if place >= 0 and self.entries[place].turn == turn else 0

    def _read(self) -> None:
        with file_errors(self.path):
            if not self.path.is_file():  # a pipe, say
                raise OSError("it is no file")
            lines = self.path.read_bytes().splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break  # was being written at a crash
            self._size += len(line)
            try:
                self._content = self._content.with_record(parse_json(line))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise DataError(f"{self.path}: line {number} is not a line of a transcript") from error
        if self.header is None and self.line_count:
            raise DataError(f"{self.path}: the transcript has no header")

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a line and sync it, after deferred lines. If this is cut off or raises DataError, nothing was added."""
        data, size = b"".join((*self._deferred, _line(record))), self._size
        before = self._content, self._size, self._deferred
        after = self._content.with_record(record), size + len(data), ()
        with (
            file_errors(self.path),
            os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, PRIVATE), "r+b", buffering=0) as file,
        ):
            if os.fstat(file.fileno()).st_size < size:
                raise OSError("another program truncated the file")
            file.truncate(size)
            try:
                file.seek(size)
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
                self._content, self._size, self._deferred = after
            except BaseException:
                self._content, self._size, self._deferred = before
                with suppress(OSError):
                    file.truncate(size)
                raise

    def defer(self, record: Mapping[str, Any]) -> None:
        """Add a line that cannot be written now. It is written together with the next one."""
        self._content, self._deferred = self._content.with_record(record), (*self._deferred, _line(record))

    def append_all(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add all lines or none, even if the process is killed; raises DataError if the file cannot be written."""
        content = self._content
        for record in records:
            content = content.with_record(record)
        with file_errors(self.path):
            before = self.path.read_bytes()[: self._size] if self.path.exists() else b""
            data = b"".join((before, *self._deferred, *map(_line, records)))
            write_atomically(self.path, data, PRIVATE)
        self._content, self._size, self._deferred = content, len(data), ()


def last_turn(path: Path) -> int:
    """Number of the last turn of a transcript, without reading more than its last line; 0 if it has none.

    Raises:
        DataError: it cannot be read, or its last line is damaged.
    """
    with file_errors(path), path.open("rb") as file:
        size, length = file.seek(0, os.SEEK_END), _TAIL_BYTES
        while True:
            file.seek(max(size - length, 0))
            *lines, _ = file.read().split(b"\n")  # what was being written at a crash has no end
            if len(lines) > 1 or length >= size:
                break
            length *= 2
    try:
        record = parse_json(lines[-1]) if lines else {}
        turn: int = check_type(record.get("turn", 0), int)
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: its last line is not a line of a transcript") from error
    return turn


def header_record(header: Header) -> dict[str, Any]:
    """The line that starts a conversation now."""
    return {"type": "session", **asdict(header), "created": _now()}


def turn_record(entry: Entry) -> dict[str, Any]:
    """The line of a turn, with the current time unless the entry has one."""
    record = {"type": "turn", **asdict(entry), "time": entry.time or _now()}
    if not entry.thinking:
        del record["thinking"]
    return record


def is_turn(record: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether this is the line of a turn."""
    try:
        return len(_Content().with_record(record).entries) == 1
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def _line(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def export(path: Path, header: Header, entries: Sequence[Entry], thinking: bool = False) -> None:
    """Write a transcript to a new file, in the format of its extension. Thinking is left out unless asked for.

    Raises:
        ConfigError: the extension is neither ``.md`` nor ``.json``.
        DataError: the file exists already, or cannot be written.
    """
    formats = {".md": _markdown, ".json": _json}
    if path.suffix not in formats:
        raise ConfigError(f"{path}: the file name must end in .md or .json")
    if not thinking:
        entries = [replace(entry, thinking="") for entry in entries]
    with file_errors(path), path.open("x", encoding="utf-8") as file:
        file.write(formats[path.suffix](header, entries))


def _markdown(header: Header, entries: Sequence[Entry]) -> str:
    lines = [f"# {header.model}, {header.policy}, window {header.window or 'unlimited'}", ""]
    if header.system:
        lines += [*(f"> {line}" for line in header.system.splitlines()), ""]
    for entry in entries:
        lines += ["**You**" + ("" if entry.kind == "said" else f" ({entry.kind})"), "", entry.prompt, ""]
        if entry.thinking:
            lines += ["**Model** (thinking)", "", *(f"> {line}" for line in entry.thinking.splitlines()), ""]
        if entry.text:
            lines += ["**Model**", "", entry.text, ""]
    return "\n".join(lines)


def _json(header: Header, entries: Sequence[Entry]) -> str:
    """The header, and the messages in the form that chat templates take."""
    messages = [{"role": "system", "content": header.system}] if header.system else []
    for entry in entries:
        messages.append({"role": "user", "content": entry.prompt})
        thinking = {"reasoning_content": entry.thinking} if entry.thinking else {}
        if entry.text or thinking:
            messages.append({"role": "assistant", "content": entry.text, **thinking})
    return json.dumps(asdict(header) | {"messages": messages}, ensure_ascii=False, indent=2) + "\n"
