"""The states of a session on disk.

What grows with a conversation is not written again with each state: logs are files that only get longer, of which a
state names a length.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
from safetensors import SafetensorError, safe_open

from h2o_stream.base.json_text import parse_json
from h2o_stream.base.resources import PRIVATE, atomic_file
from h2o_stream.cache.state import MARKS, Array, State, logs_of
from h2o_stream.errors import DataError
from h2o_stream.session.jsonl import check_type
from h2o_stream.session.state_format import decode_state, write_state

_LOGS = "logs"
"""What names the files of logs in a file's metadata, with their lengths."""

LOG_FILE = ".log"
"""What the names of files with logs end with."""

_SEGMENTS = "memory-*"
"""Files beside the states of versions before 0.3, which a stream goes on without."""

_NUMBER = numpy.dtype("<i4")

Mark = tuple[int, int]
"""A length of a log, and a checksum up to there; see `NumberLog.marks`."""


class StateFiles:
    """The files ``state-N.safetensors`` of a folder, and the logs that they share, each in a file.

    `sync`: see `Session`.
    """

    def __init__(self, folder: Path, sync: bool = True) -> None:
        self._folder, self._sync = folder, sync
        self._logs = dict[str, tuple[str, set[Mark]]]()  # the file of each log, and marks of what is in it

    def start_logs(self) -> None:
        """Write logs into new files from now on, because what follows is another conversation."""
        self._logs.clear()

    def write(self, line: int, state: Mapping[str, Array], record: Mapping[str, Any]) -> None:
        """Save the state after a line, together with the record of that line, or raise OSError: the disk is full."""
        logs = {name: (self._write_log(name, state), len(state[name])) for name in logs_of(state) if len(state[name])}
        metadata = {"line": json.dumps(record, ensure_ascii=False), _LOGS: json.dumps(logs)}
        others = {name: array for name, array in state.items() if name not in logs}
        with atomic_file(self._path(line), PRIVATE, self._sync) as written:
            write_state(written, others, metadata)

    def read(self, line: int, turn: int) -> State | None:
        """The state after a line, if it is the line of this turn; None if there is none or its header is damaged.

        Raises:
            DataError: the file is damaged.
        """
        record = self.record(line)
        if record is None or record["turn"] != turn:
            return None
        path = self._path(line)
        try:
            state = decode_state(path.read_bytes())
            for name, (file, length) in self._logs_named(path).items():
                if length * _NUMBER.itemsize > _size(self._folder / file):
                    raise ValueError(f"{file} is too short")
                state[name] = numpy.fromfile(self._folder / file, _NUMBER, length)
                self._logs[name] = file, _marks(state, name)
            return state
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: damaged: {error}") from error

    def _write_log(self, name: str, state: Mapping[str, Array]) -> str:
        """Write what a file lacks of a log, and return its name. Where nothing is known to be the same, it is new."""
        file, known = self._logs.pop(name, ("", set()))
        common = max(known & _marks(state, name), default=(0, 0))[0]
        if not common or _size(self._folder / file) < common * _NUMBER.itemsize:
            file, common = f"{name}-{secrets.token_hex(4)}{LOG_FILE}", 0
        with os.fdopen(os.open(self._folder / file, os.O_WRONLY | os.O_CREAT, PRIVATE), "wb") as written:
            written.seek(common * _NUMBER.itemsize)
            written.write(state[name][common:].astype(_NUMBER).data)
            if self._sync:
                written.flush()
                os.fsync(written.fileno())
        self._logs[name] = file, _marks(state, name)
        return file

    def record(self, line: int) -> dict[str, Any] | None:
        """The record of a turn's line; None if its state is missing or damaged."""
        try:
            if not self._path(line).is_file():  # a pipe would be waited for
                return None
            with safe_open(self._path(line), "np") as file:
                record: dict[str, Any] = parse_json(file.metadata()["line"])
                return record if isinstance(record, dict) and type(record.get("turn")) is int else None
        except (SafetensorError, OSError, KeyError, TypeError, ValueError):
            return None

    def keep(self, predicate: Callable[[int], bool]) -> None:
        """Keep the states after the lines that satisfy the predicate, and delete all others."""
        for path in self._folder.glob("state-*.safetensors"):
            with suppress(ValueError, OSError):
                if not predicate(int(path.stem.removeprefix("state-"))):
                    path.unlink(missing_ok=True)
        self._delete_unused()

    def _delete_unused(self) -> None:
        """Delete the logs that no state names any more, and what no state needs."""
        if not (files := {*self._folder.glob(_SEGMENTS), *self._folder.glob(f"*{LOG_FILE}")}):
            return
        for path in filter(Path.is_file, self._folder.glob("state-*.safetensors")):
            with suppress(SafetensorError, OSError, ValueError):
                files -= {self._folder / file for file, _ in self._logs_named(path).values()}
        for file in files:
            with suppress(OSError):
                file.unlink(missing_ok=True)

    @staticmethod
    def _logs_named(path: Path) -> dict[str, tuple[str, int]]:
        """The files of the logs of a state by their names, with their lengths."""
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
        try:
            return {
                name: (check_type(file, str), check_type(length, int))
                for name, (file, length) in parse_json(metadata.get(_LOGS, "{}")).items()
                if "/" not in file
            }
        except (AttributeError, TypeError) as error:
            raise ValueError("it names no files") from error

    def _path(self, line: int) -> Path:
        return self._folder / f"state-{line:08}.safetensors"


def _marks(state: Mapping[str, Array], name: str) -> set[Mark]:
    return set(map(tuple, state[name + MARKS].tolist()))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
