"""Conversations on disk: a transcript that grows line by line, and the states of the last turns.

A session is a folder. ``transcript.jsonl`` has a header and a line for each thing that happened; every line is
synced before the next turn begins. ``state-N.safetensors`` is everything there was after the N-th line, and holds that
line too: it is written first, so a turn whose line is missing is found there.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from h2o_stream.errors import ConfigError, DataError
from h2o_stream.resources import data_folder
from h2o_stream.session.states import StateFiles
from h2o_stream.session.transcript import Entry, Header, Transcript, header_record, turn_record

if TYPE_CHECKING:
    from torch import Tensor

STATES_KEPT = 8
"""Turns that can be taken back."""

_NAME = re.compile(r"\w[\w.-]{0,63}")
_NAME_BYTES = 255
"""What file systems take."""


class Session:
    """One conversation on disk, open in one process only. A context manager.

    Args:
        name: of the session: letters, digits, ``_``, ``-`` and ``.``, at most 64, and 255 bytes.
        folder: where sessions are; the default is the user's data folder.
        create: begin it where there is none.

    Attributes:
        name: of the session.
        transcript: what was said.

    Raises:
        ConfigError: the name cannot be one.
        DataError: the folder cannot be written, the transcript is damaged, another process has the session open, or
            there is none and none is to be begun.
    """

    def __init__(self, name: str, folder: Path | None = None, create: bool = True) -> None:
        from filelock import FileLock, Timeout

        self.name, self._folder = name, _folder(name, folder)
        path = self._folder / "transcript.jsonl"
        try:
            if not create and not (path.exists() and path.stat().st_size):  # one without a line was never begun
                raise DataError(f"there is no session {name}; h2o-chat --sessions lists them")
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = FileLock(self._folder / "lock", timeout=0)
            self._lock.acquire()
            self.transcript, self._states = Transcript(path), StateFiles(self._folder)
            self._recover()
            self._fresh = not self.transcript.lines
        except Timeout as error:
            raise DataError(
                f"session {name} is open in another process; leave it there, or use another name"
            ) from error
        except OSError as error:
            self.close()
            with suppress(OSError):
                self._folder.rmdir()  # if nothing is in it
            raise DataError(f"session {name}: {error.strerror or error}: {self._folder}") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes have it; a second time does nothing."""
        if hasattr(self, "_lock"):
            self._lock.release()

    def discard(self) -> None:
        """Close it; if it was empty when it was opened, leave nothing of it."""
        if self._fresh:
            shutil.rmtree(self._folder, ignore_errors=True)
        self.close()

    def _recover(self) -> None:
        """Take over the line of a turn whose state was saved when the process ended; drop what is of no use."""
        for path in self._folder.glob("*.part"):
            path.unlink(missing_ok=True)
        while record := self._states.record(self.transcript.lines + 1):
            self._append_or_owe(record)
        self._prune()

    def _prune(self) -> None:
        """Drop the states of turns that are too old, or not there any more."""
        self._states.keep(list(self.transcript.numbers.values())[-STATES_KEPT:])

    def begin(self, header: Header) -> None:
        """Start anew; what was said before stays in the file.

        Raises:
            DataError: the disk is full, say; nothing has changed then.
        """
        self.transcript.append(header_record(header))
        self._prune()

    def add(self, entry: Entry, state: Mapping[str, Tensor] | None, header: Header | None = None) -> None:
        """Save a turn, and what there is after it.

        What could not be written for want of room is owed: it is written with the next turn. Whatever else cuts this
        off, the turn was not added.

        Args:
            entry: the turn.
            state: what there is after it.
            header: begins the session, if nothing did yet.

        Raises:
            DataError: the disk is full, say. What was saved before is as it was.
        """
        lost, trouble = "the words of this turn are saved, the state of the cache is not", None
        if header is not None and self.transcript.header is None:
            self._append_or_owe(header_record(header))
        line, record = self.transcript.lines + 1, turn_record(entry)
        try:
            try:
                if state is not None:
                    self._states.write(line, state, record)
            except OSError as error:
                trouble = error.strerror or str(error)
            if (unwritten := self._append_or_owe(record)) is not None:
                lost, trouble = "this turn is not saved yet", trouble or unwritten
        finally:
            if self.transcript.lines < line:
                self._states.drop_from(line)
        self._prune()
        if trouble is not None:
            raise DataError(f"session {self.name}: {trouble}; {lost}")

    def _append_or_owe(self, record: Mapping[str, Any]) -> str | None:
        """What was in the way, or None."""
        try:
            self.transcript.append(record)
        except DataError as error:
            self.transcript.owe(record)
            return str(error)
        return None

    def add_all(
        self, header: Header, entries: Sequence[Entry], state: Callable[[int], Mapping[str, Tensor] | None]
    ) -> None:
        """Start anew with turns that were, all of them or none, even if the process is killed.

        Args:
            header: of the conversation.
            entries: its turns.
            state: what there was after a turn, by its number; None where that is not known.

        Raises:
            DataError: the disk is full, say; nothing has changed then.
        """
        records = [turn_record(entry) for entry in entries]
        first, before = self.transcript.lines + 2, self.transcript.lines
        try:
            for line, (entry, record) in list(enumerate(zip(entries, records, strict=True), first))[-STATES_KEPT:]:
                if (tensors := state(entry.turn)) is not None:
                    self._states.write(line, tensors, record)
            self.transcript.replace([header_record(header), *records])
        except OSError as error:
            raise DataError(f"session {self.name}: {error.strerror or error}; it is not saved") from error
        finally:
            if self.transcript.lines == before:
                self._states.drop_from(first)
        self._prune()

    def undo(self, turn: int) -> None:
        """Forget what came after a turn.

        Raises:
            DataError: the disk is full, say; nothing has changed then.
        """
        self.transcript.append({"type": "undo", "turn": turn})
        self._prune()

    def state(self, turn: int) -> dict[str, Tensor] | None:
        """What there was after a turn; None if that is not known any more.

        Raises:
            DataError: the file is damaged.
        """
        return self._states.read(self.transcript.numbers.get(turn, 0), turn)


def saved_sessions(folder: Path | None = None) -> list[tuple[str, Transcript]]:
    """Every session there is, by name; damaged ones are left out."""
    found = []
    for path in sorted((folder or sessions_folder()).glob("*/transcript.jsonl")):
        with suppress(DataError):
            found.append((path.parent.name, Transcript(path)))
    return found


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
    if not _NAME.fullmatch(name) or len(os.fsencode(name)) > _NAME_BYTES:
        raise ConfigError(
            f"{name!r} cannot name a session; --session takes letters, digits, _, - and ., at most 64 "
            f"and {_NAME_BYTES} bytes"
        )
    return (folder or sessions_folder()) / name
