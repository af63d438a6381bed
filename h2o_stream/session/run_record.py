"""``--jsonl``: one record a line, written and flushed as it happens, so that an interrupted run is kept."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TextIO

from h2o_stream.errors import DataError
from h2o_stream.session.lines import to_json_line

RUN, RECORDS = "run.json", "records.jsonl"
"""Names of the files that a comparison writes into its folder: what ran, and all it found."""


class Records:
    """A JSON Lines file, standard output (``-``), or nothing at all (None)."""

    def __init__(self, target: str | None) -> None:
        self._file: TextIO | None = None
        self._owned = target not in (None, "-")
        self._target = target
        if target == "-":
            self._file = sys.stdout
        elif target is not None:
            try:
                self._file = Path(target).open("w", encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                raise DataError(f"--jsonl {target}: {error.strerror or error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._owned and self._file is not None:
            with suppress(OSError):  # every record was flushed: an error here was reported then
                self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        """Append a record.

        Raises:
            DataError: the file cannot be written any more (disk full, say).
        """
        if self._file is None:
            return
        try:
            self._file.write(to_json_line(record, self._file.encoding))
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise DataError(f"--jsonl {self._target}: {error.strerror or error}") from error


def run_record(command: str, **settings: Any) -> dict[str, Any]:
    """The first record of every run: what ran, with what, on what."""
    from importlib.metadata import version

    packages = ("h2o-stream", "torch", "transformers", "tokenizers")
    return {
        "type": "run",
        "command": command,
        **settings,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "hardware": hardware(),
    }


def hardware() -> dict[str, Any]:
    """This machine."""
    import psutil

    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def name_of(run: Mapping[str, Any]) -> str:
    """The comparison that a run record is of."""
    return str(run["command"]).rpartition(" ")[2]


def read_run(folder: Path) -> dict[str, Any]:
    """The run record of a folder.

    Raises:
        DataError: there is none, or it is damaged.
    """
    try:
        run = json.loads((folder / RUN).read_text(encoding="utf-8"))
        if not isinstance(run, dict) or not isinstance(run.get("command"), str):
            raise ValueError("no run record")
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / RUN}: {error}; is this the --out folder of a comparison?") from error
    return run


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
