"""The first record of every run: which command ran, with which settings, on which machine."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from h2o_stream.base.json_text import parse_json
from h2o_stream.base.resources import version_of
from h2o_stream.errors import DataError

RUN, RECORDS = "run.json", "records.jsonl"
"""The files of a comparison's folder that hold its run record and all its results."""


def run_record(command: str, **settings: Any) -> dict[str, Any]:
    """The first record of a run."""
    packages = ("h2o-stream", "torch", "transformers", "tokenizers")
    return {
        "type": "run",
        "command": command,
        **settings,
        "versions": {"python": platform.python_version(), **{name: version_of(name) or None for name in packages}},
        "hardware": hardware(),
    }


def hardware() -> dict[str, Any]:
    """A description of this machine."""
    import psutil

    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def read_run_record(folder: Path) -> dict[str, Any]:
    """The run record of a folder; raises DataError if there is none, or it is damaged."""
    try:
        run = parse_json((folder / RUN).read_text(encoding="utf-8"))
        if not isinstance(run, dict) or not isinstance(run.get("command"), str):
            raise ValueError("not a run record")
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
