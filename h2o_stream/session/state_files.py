"""The states of a session on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from h2o_stream.cache.state import Array, State
from h2o_stream.cache.token_memory import MEMORY_FILE, sealed_segments
from h2o_stream.errors import DataError
from h2o_stream.resources import PRIVATE, atomic_file, write_atomically
from h2o_stream.session.mapped_file import map_file
from h2o_stream.session.state_format import decode_state, write_state

_SEGMENTS = "segments"
"""What names the files of shared arrays in a file's metadata."""


class StateFiles:
    """The files ``state-N.safetensors`` of a folder, and segments of memories that they share, each in a file.

    Args:
        folder: of the files.
        sync: see `Session`.
    """

    def __init__(self, folder: Path, sync: bool = True) -> None:
        self._folder, self._sync = folder, sync

    def write(self, line: int, state: Mapping[str, Array], record: Mapping[str, Any]) -> None:
        """Save the state after a line, together with the record of that line.

        Raises:
            OSError: for example, the disk is full.
        """
        sealed = sealed_segments(state)
        for name, file in sealed.items():
            if not (path := self._folder / file).exists():
                write_atomically(path, state[name].tobytes(), PRIVATE)
        metadata = {"line": json.dumps(record, ensure_ascii=False), _SEGMENTS: json.dumps(sealed)}
        others = {name: array for name, array in state.items() if name not in sealed}
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
            segments = {name: map_file(self._folder / file) for name, file in self._segments(path).items()}
            return decode_state(path.read_bytes()) | segments
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path}: damaged: {error}") from error

    def record(self, line: int) -> dict[str, Any] | None:
        """The record of a turn's line; None if its state is missing or damaged."""
        try:
            with safe_open(self._path(line), "np") as file:
                record: dict[str, Any] = json.loads(file.metadata()["line"])
                return record if "turn" in record else None
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
        """Delete the segments of memories that no state names any more."""
        if not (files := set(self._folder.glob(f"{MEMORY_FILE}*"))):
            return
        for path in self._folder.glob("state-*.safetensors"):
            with suppress(SafetensorError, OSError):
                files -= {self._folder / file for file in self._segments(path).values()}
        for file in files:
            with suppress(OSError):
                file.unlink(missing_ok=True)

    @staticmethod
    def _segments(path: Path) -> dict[str, str]:
        """The files of the arrays that a state shares with others, by their names."""
        with safe_open(path, "np") as file:
            segments: dict[str, str] = json.loads((file.metadata() or {}).get(_SEGMENTS, "{}"))
        return {name: file for name, file in segments.items() if file.startswith(MEMORY_FILE) and "/" not in file}

    def _path(self, line: int) -> Path:
        return self._folder / f"state-{line:08}.safetensors"
