"""The states of a session's last turns: a file for each, which appears whole or not at all.

A file's name says after which line of the transcript, from 1, its state was taken; the file holds that line too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h2o_stream.errors import DataError
from h2o_stream.session.transcript import write_whole

if TYPE_CHECKING:
    from torch import Tensor


class StateFiles:
    """The ``state-N.safetensors`` of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, line: int, state: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Save the state after a line, and what that line says.

        Raises:
            OSError: the disk is full, say.
        """
        from safetensors.torch import save

        data = save(dict(state), metadata={"line": json.dumps(record, ensure_ascii=False)})
        write_whole(self._path(line), data)

    def read(self, line: int, turn: int) -> dict[str, Tensor] | None:
        """The state after a line, which is that of a turn; None if there is none or its header is damaged.

        Raises:
            DataError: the file is damaged.
        """
        record = self.record(line)
        if record is None or record["turn"] != turn:
            return None
        from safetensors import SafetensorError
        from safetensors.torch import load

        path = self._path(line)
        try:
            return load(path.read_bytes())
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path}: damaged: {error}") from error

    def record(self, line: int) -> dict[str, Any] | None:
        """What the line of a turn says; None if its state is missing or damaged."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._path(line), "pt") as file:
                record: dict[str, Any] = json.loads(file.metadata()["line"])
                return record if "turn" in record else None
        except (SafetensorError, OSError, KeyError, TypeError, ValueError):
            return None

    def keep(self, lines: Collection[int]) -> None:
        """Drop the states after all other lines."""
        for line, path in self._paths():
            if line not in lines:
                _remove(path)

    def drop_from(self, first: int) -> None:
        """Drop the states after this line and those behind it."""
        for line, path in self._paths():
            if line >= first:
                _remove(path)

    def _paths(self) -> list[tuple[int, Path]]:
        paths = []
        for path in self._folder.glob("state-*.safetensors"):
            with suppress(ValueError):
                paths.append((int(path.stem.removeprefix("state-")), path))
        return paths

    def _path(self, line: int) -> Path:
        return self._folder / f"state-{line:08}.safetensors"


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
