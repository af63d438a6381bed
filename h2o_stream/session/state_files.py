"""The states after a session's last turns, one file each. A file is written completely or not at all.

Its name has the number of the transcript line, from 1, after which the state was taken. The file also contains that
line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from h2o_stream.errors import DataError
from h2o_stream.resources import PRIVATE, write_atomically

if TYPE_CHECKING:
    from torch import Tensor


class StateFiles:
    """The files ``state-N.safetensors`` of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, line: int, state: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Save the state after a line, together with the record of that line.

        Raises:
            OSError: for example, the disk is full.
        """
        from safetensors.torch import save

        data = save(dict(state), metadata={"line": json.dumps(record, ensure_ascii=False)})
        write_atomically(self._path(line), data, PRIVATE)

    def read(self, line: int, turn: int) -> dict[str, Tensor] | None:
        """The state after a line, if it is the line of this turn; None if there is none or its header is damaged.

        Raises:
            DataError: the file is damaged.
        """
        record = self.record(line)
        if record is None or record["turn"] != turn:
            return None
        from safetensors.torch import load

        path = self._path(line)
        try:
            return load(path.read_bytes())
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path}: damaged: {error}") from error

    def record(self, line: int) -> dict[str, Any] | None:
        """The record of a turn's line; None if its state is missing or damaged."""
        try:
            with safe_open(self._path(line), "pt") as file:
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

    def _path(self, line: int) -> Path:
        return self._folder / f"state-{line:08}.safetensors"
