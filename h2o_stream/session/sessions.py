"""Conversations on disk: a transcript that grows line by line, and the states of the last turns.

A session is a folder. ``transcript.jsonl`` has a header and a line for each thing that happened; every line is
synced before the next turn begins. ``state-N.safetensors`` is everything there was after the N-th line, and holds that
line too: it is written first and appears whole or not at all, so that a turn whose line is missing is found there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from h2o_stream.errors import ConfigError, DataError
from h2o_stream.resources import data_folder

if TYPE_CHECKING:
    from torch import Tensor

STATES_KEPT = 8
"""Turns that can be taken back."""

_NAME = re.compile(r"\w[\w.-]{0,63}")

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


class Transcript:
    """What a session's file says, and the file.

    Args:
        path: of the file; it is created with the first line.

    Attributes:
        header: of the conversation that was begun last.
        entries: its turns, less those that were taken back.
        lines: in the file.
        begun: the line of the header.

    Raises:
        DataError: it cannot be read, or is not a transcript.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: Header | None = None
        self.entries: list[Entry] = []
        self.lines = self.begun = self._whole = 0
        if path.exists():
            self._read()

    def _read(self) -> None:
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror or error}") from error
        self._whole = data.rfind(b"\n") + 1  # a last line without its end was being written when the power went
        for number, line in enumerate(data[: self._whole].splitlines(), 1):
            try:
                self._take(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise DataError(f"{self.path}: line {number} is not one of a transcript") from error
        if self.header is None and self.lines:
            raise DataError(f"{self.path}: the transcript has no header")

    def _take(self, record: dict[str, Any]) -> None:
        kind = record["type"]
        if kind == "session":
            self.header = Header(**{field.name: record[field.name] for field in fields(Header)})
            self.entries, self.begun = [], self.lines + 1
        elif kind == "turn":
            self.entries.append(Entry(**{field.name: record[field.name] for field in fields(Entry)}))
        elif kind == "undo":
            turn = int(record["turn"])
            self.entries = [entry for entry in self.entries if entry.turn <= turn]
        else:
            raise ValueError(kind)
        self.lines += 1

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a line and have it on the disk.

        Raises:
            DataError: the file cannot be written.
        """
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
        try:
            with os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
                end = self._whole
                file.truncate(end)
                file.seek(end)
                try:
                    file.write(line)
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    with suppress(OSError):
                        file.truncate(end)
                    raise
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror or error}; this turn is not saved") from error
        self._whole = end + len(line)
        self._take(dict(record))


class Session:
    """One conversation on disk, open in one process only. A context manager.

    Args:
        name: of the session: letters, digits, ``_``, ``-`` and ``.``, at most 64.
        folder: where sessions are; the default is the user's data folder.

    Attributes:
        transcript: what was said.

    Raises:
        ConfigError: the name cannot be one.
        DataError: the folder cannot be written, the transcript is damaged, or another process has the session open.
    """

    def __init__(self, name: str, folder: Path | None = None) -> None:
        from filelock import FileLock, Timeout

        self.name, self._folder = name, _folder(name, folder)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = FileLock(self._folder / "lock", timeout=0)
            self._lock.acquire()
        except Timeout as error:
            raise DataError(
                f"session {name} is open in another process; leave it there, or use another name"
            ) from error
        except OSError as error:
            raise DataError(f"session {name}: {error.strerror or error}: {self._folder}") from error
        try:
            self.transcript = Transcript(self._folder / "transcript.jsonl")
            self._settle()
        except DataError:
            self._lock.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def _states(self) -> dict[int, Path]:
        """By the number of the line after which they were taken."""
        found = {}
        for path in self._folder.glob("state-*.safetensors"):
            with suppress(ValueError):
                found[int(path.stem.removeprefix("state-"))] = path
        return dict(sorted(found.items()))

    def _settle(self) -> None:
        """Take over the line of a turn whose state was saved when the process ended; drop what is of no use."""
        for path in self._folder.glob("*.part"):
            path.unlink(missing_ok=True)
        for line, path in self._states().items():
            if line == self.transcript.lines + 1 and (record := _line_of(path)):
                self.transcript.append(record)

    def begin(self, header: Header) -> None:
        """Start anew; what was said before stays in the file."""
        self.transcript.append({"type": "session", **asdict(header), "created": _now()})

    def add(self, entry: Entry, state: Mapping[str, Tensor] | None) -> None:
        """Save a turn, and what there is after it.

        Raises:
            DataError: the disk is full, say. What was saved before is as it was.
        """
        record = {"type": "turn", **asdict(entry), "time": _now()}
        trouble = None
        if state is not None:
            try:
                self._write_state(self.transcript.lines + 1, state, record)
            except OSError as error:
                trouble = error
        self.transcript.append(record)
        if trouble is not None:
            raise DataError(
                f"session {self.name}: {trouble.strerror or trouble}; the words of this turn are saved, "
                "the state of the cache is not"
            ) from trouble

    def undo(self, turn: int) -> None:
        """Forget what came after a turn."""
        self.transcript.append({"type": "undo", "turn": turn})
        for path in self._states().values():
            record = _line_of(path)
            if record is not None and record["turn"] > turn:
                path.unlink(missing_ok=True)

    def state(self, turn: int) -> dict[str, Tensor] | None:
        """What there was after a turn; None if that is not known any more.

        Raises:
            DataError: the file is damaged.
        """
        for line, path in reversed(self._states().items()):
            record = _line_of(path)
            if line > self.transcript.begun and record is not None and record["turn"] == turn:
                from safetensors import SafetensorError
                from safetensors.torch import load

                try:
                    return load(path.read_bytes())
                except (SafetensorError, OSError) as error:
                    raise DataError(f"{path}: damaged: {error}") from error
        return None

    def copied_to(self, name: str) -> Session:
        """The same under another name, open.

        Raises:
            ConfigError, DataError: see `Session`, and when there is one of that name.
        """
        target = _folder(name, self._folder.parent)
        if target.exists():
            raise DataError(f"there is a session {name} already; take another name")
        try:
            target.mkdir(mode=0o700, parents=True)
            for path in (self.transcript.path, *self._states().values()):
                if path.exists():
                    shutil.copy2(path, target)
        except OSError as error:
            shutil.rmtree(target, ignore_errors=True)
            raise DataError(f"session {name}: {error.strerror or error}") from error
        return Session(name, self._folder.parent)

    def _write_state(self, line: int, state: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        from safetensors.torch import save

        for old in list(self._states().values())[: -STATES_KEPT + 1]:
            old.unlink(missing_ok=True)
        path = self._folder / f"state-{line:08}.safetensors"
        unfinished = path.with_suffix(".part")
        data = save(dict(state), metadata={"line": json.dumps(record, ensure_ascii=False)})
        try:
            with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def saved_sessions(folder: Path | None = None) -> list[tuple[str, Transcript]]:
    """Every session there is, by name; damaged ones are left out."""
    found = []
    for path in sorted((folder or sessions_folder()).glob("*/transcript.jsonl")):
        with suppress(DataError):
            found.append((path.parent.name, Transcript(path)))
    return found


def export(path: Path, header: Header, entries: Sequence[Entry]) -> None:
    """Write a transcript as Markdown, or as JSON if the file's name ends so; never over another file.

    Raises:
        ConfigError: the name ends neither way.
        DataError: the file is there already, or cannot be written.
    """
    writers = {".md": _markdown, ".json": _json}
    if path.suffix not in writers:
        raise ConfigError(f"{path} ends neither in .md nor in .json; name the file so that it says what it is to be")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(writers[path.suffix](header, entries))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _markdown(header: Header, entries: Sequence[Entry]) -> str:
    """For people."""
    lines = [f"# {header.model}, {header.policy}, window {header.window or 'unlimited'}", ""]
    if header.system:
        lines += [*(f"> {line}" for line in header.system.splitlines()), ""]
    for entry in entries:
        lines += ["**You**" + ("" if entry.kind == "said" else f" ({entry.kind})"), "", entry.prompt, ""]
        if entry.text:
            lines += ["**Model**", "", entry.text, ""]
    return "\n".join(lines)


def _json(header: Header, entries: Sequence[Entry]) -> str:
    """For programs: the header and the messages, as chat templates take them."""
    messages = [{"role": "system", "content": header.system}] if header.system else []
    for entry in entries:
        messages.append({"role": "user", "content": entry.prompt})
        if entry.text:
            messages.append({"role": "assistant", "content": entry.text})
    return json.dumps(asdict(header) | {"messages": messages}, ensure_ascii=False, indent=2) + "\n"


def sessions_folder() -> Path:
    """Where sessions are."""
    return data_folder() / "sessions"


def find_transcript(name: str) -> Transcript:
    """The transcript of a session, to be read only.

    Raises:
        ConfigError: the name cannot be one.
        DataError: there is no such session.
    """
    path = _folder(name, None) / "transcript.jsonl"
    if not path.exists():
        raise DataError(f"there is no session {name}; h2o-chat --sessions lists them")
    return Transcript(path)


def _folder(name: str, folder: Path | None) -> Path:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot name a session; --session takes letters, digits, _, - and ., at most 64")
    return (folder or sessions_folder()) / name


def _line_of(path: Path) -> dict[str, Any] | None:
    """The line of the turn after which a state was taken; None if the state is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            line: dict[str, Any] = json.loads(file.metadata()["line"])
            return line if "turn" in line else None
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
