"""Conversations on disk: a transcript that grows line by line, and the states after the last turns.

A session is a folder. ``transcript.jsonl`` has a header and a line for each turn or undo; every line is synced before
the next turn begins. ``state-N.safetensors`` is the complete state after line N and also contains that line. It is
written first, so a turn whose line is missing can be recovered from it. ``settings.json`` has the options that the
session was left with. An empty file ``automatic`` marks a session that the user did not name: its states are saved when
it is closed, so that a turn costs no more than a line.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from h2o_stream.base.resources import private_data_folder
from h2o_stream.cache.state import Array, State
from h2o_stream.config import AUTOMATIC_BYTES
from h2o_stream.errors import DataError
from h2o_stream.session.folders import AUTOMATIC, SESSIONS, TRANSCRIPT, open_elsewhere, session_folder, unknown_session
from h2o_stream.session.state_files import StateFiles
from h2o_stream.session.transcript import Entry, Header, Transcript, header_record, is_turn, turn_record

MAX_STATES = 8
"""Number of turns that can be undone."""

_CLOSING_STATES = 2
"""How many of the last states an automatic session has after it was closed: the first ``/undo`` needs the second."""


class Session:
    """One conversation on disk, open in one process only. A context manager.

    Args:
        name: name of the session: letters, digits, ``_``, ``-`` and ``.``, at most 64 characters and 255 bytes.
        folder: folder of all sessions; the default is in the user's data folder.
        create: start it if it does not exist.
        max_states: how many of the last states are kept.
        sync_states: whether a saved state survives a power failure. Its turn's text does in either case.

    Raises:
        ConfigError: the name is not allowed.
        DataError: the folder cannot be written, the transcript is damaged, another process has the session open, or
            it does not exist and `create` is False.
    """

    def __init__(
        self,
        name: str,
        folder: Path | None = None,
        create: bool = True,
        max_states: int = MAX_STATES,
        sync_states: bool = True,
    ) -> None:
        from filelock import FileLock, Timeout

        self._max_states = max_states
        self.name, self._folder = name, session_folder(name, folder)
        path = self._folder / TRANSCRIPT
        try:
            if not create and not (path.exists() and path.stat().st_size):  # without a line it was never started
                raise unknown_session(name)
            if folder is None:
                private_data_folder(SESSIONS)
            self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._lock = FileLock(self._folder / "lock", timeout=0, thread_local=False)  # any thread may close it
            self._lock.acquire()
            self.automatic = (self._folder / AUTOMATIC).exists()
            self.transcript = Transcript(path)
            self._states = StateFiles(self._folder, sync_states and not self.automatic)
            self._recover()
            self._is_new = not self.transcript.line_count
        except Timeout as error:
            raise open_elsewhere(name) from error
        except OSError as error:
            self.close()
            with suppress(OSError):
                self._folder.rmdir()  # only if it is empty
            raise DataError(f"session {name}: {error.strerror or error}: {self._folder}") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Release it for other processes. Calling this again does nothing."""
        if hasattr(self, "_lock"):
            self._lock.release()

    def discard(self) -> None:
        """Close it, and delete it if it was new when it was opened."""
        if self._is_new:
            shutil.rmtree(self._folder, ignore_errors=True)
        self.close()

    def save_states(self, states: Mapping[int, State]) -> None:
        """Save the last of these states, by turn, of an automatic session that is to be closed.

        What is too large, or does not fit on the disk, is left out: the text can be fed again.
        """
        entries, lines = self.transcript.entries[-MAX_STATES:], self.transcript.line_numbers[-MAX_STATES:]
        saved = [item for item in zip(lines, entries, strict=True) if item[1].turn in states][-_CLOSING_STATES:]
        room = AUTOMATIC_BYTES // 4
        with suppress(OSError):
            for line, entry in reversed(saved):
                room -= sum(array.nbytes for array in states[entry.turn].values())
                if room >= 0:
                    self._states.write(line, states[entry.turn], turn_record(entry))
        self._prune()

    @property
    def index_path(self) -> Path:
        """The file of its recall index, which can be rebuilt from the transcript."""
        return self._folder / "passages.sqlite"

    def _recover(self) -> None:
        """Add the line of a turn if only its state was saved before a crash, and delete leftover files."""
        for path in self._folder.glob("*.part"):
            path.unlink(missing_ok=True)
        while is_turn(record := self._states.record(self.transcript.line_count + 1)):
            self._append_or_defer(record)
        self._prune()

    def _prune(self) -> None:
        """Delete the states of turns that are too old or were undone."""
        recent = self.transcript.line_numbers[-self._max_states :]
        self._states.keep(lambda line: line in recent)

    def begin(self, header: Header) -> None:
        """Start a new conversation; earlier ones stay. Raises DataError, with nothing changed: the disk is full."""
        self.transcript.append(header_record(header))
        self._prune()

    def add(self, entry: Entry, state: Mapping[str, Array] | None, header: Header | None = None) -> None:
        """Save a turn and the state after it. The header starts a session that has none yet.

        A line that cannot be written because the disk is full is written with the next turn. If anything else
        interrupts this call, the turn was not added.

        Raises:
            DataError: for example, the disk is full. Earlier turns are unaffected.
        """
        lost, trouble = "the text of this turn is saved, the state of the cache is not", ""
        if header is not None and self.transcript.header is None:
            self._append_or_defer(header_record(header))
        line, record = self.transcript.line_count + 1, turn_record(entry)
        try:
            try:
                if state is not None:
                    self._states.write(line, state, record)
            except OSError as error:
                trouble = error.strerror or str(error)
            if unwritten := self._append_or_defer(record):
                lost, trouble = "this turn is not saved yet", trouble or unwritten
        finally:
            if self.transcript.line_count < line:
                self._states.keep(lambda number: number < line)
        self._prune()
        if trouble:
            raise DataError(f"session {self.name}: {trouble}; {lost}")

    def _append_or_defer(self, record: Mapping[str, Any]) -> str:
        """Returns why the record could not be written; empty if it was."""
        try:
            self.transcript.append(record)
        except DataError as error:
            self.transcript.defer(record)
            return str(error)
        return ""

    def add_all(
        self, header: Header, entries: Sequence[Entry], state: Callable[[int], Mapping[str, Array] | None]
    ) -> None:
        """Start a new conversation with these turns. All are saved or none, even if the process is killed. `state`
        returns the state after a turn by its number; None if it is not available.

        Raises:
            DataError: for example, the disk is full. Nothing has changed.
        """
        records = [turn_record(entry) for entry in entries]
        first, before = self.transcript.line_count + 2, self.transcript.line_count
        self._states.start_logs()
        try:
            for line, (entry, record) in list(enumerate(zip(entries, records, strict=True), first))[
                -self._max_states :
            ]:
                if (arrays := state(entry.turn)) is not None:
                    self._states.write(line, arrays, record)
            self.transcript.append_all([header_record(header), *records])
        except OSError as error:
            raise DataError(f"session {self.name}: {error.strerror or error}; it is not saved") from error
        finally:
            if self.transcript.line_count == before:
                self._states.keep(lambda number: number < first)
                self._states.start_logs()
        self._prune()

    def undo(self, turn: int) -> None:
        """Remove all turns after this one; 0 is all. Raises DataError, with nothing changed: the disk is full."""
        self.transcript.append({"type": "undo", "turn": turn})
        self._prune()

    def state(self, turn: int) -> State | None:
        """The state after a turn; None if it is no longer available. Raises DataError if the file is damaged."""
        return self._states.read(self.transcript.line_of(turn), turn)
