"""The folder of a comparison: its run record, the result of every finished job, at last records, tables and plots.

No result is ever overwritten. The same comparison resumes, with more policies if asked for; another one is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from h2o_stream.base.resources import version_of, write_atomically
from h2o_stream.cache.source import policy_source
from h2o_stream.compare.models import digest_of_model, dtype_of, plan_for
from h2o_stream.config import CacheConfig
from h2o_stream.errors import DataError, file_errors
from h2o_stream.native import library
from h2o_stream.native.threads import num_threads
from h2o_stream.runtime.model import RuntimeModel
from h2o_stream.session.run_record import RECORDS, RUN, hardware, read_run_record

_MAY_DIFFER = ("versions", "hardware", "command_line", "begun", "processes")
"""Fields of a run record that may differ when a comparison resumes; timed ones also have `machine`."""

_MAY_GROW = ("cache", "policy", "window", "seed")
"""Fields with an item for each policy, to which a resumed comparison may add."""

_VALUES, _KEPT = "values", ".kept"
"""The tensor of values in a file, and the suffix of a file of what is kept of an interrupted job."""


def identity(model: Any, config: CacheConfig) -> dict[str, Any]:
    """What a result depends on: model, dtype, and the policy as configured and as this version resolves it."""
    plan = plan_for(model, config)
    return {
        "model": digest_of_model(model),
        "native": isinstance(model, RuntimeModel),
        "dtype": dtype_of(model),
        "config": asdict(config),
        "plan": asdict(plan),
        "source": policy_source(plan),
        "version": version_of("h2o-stream"),
    }


def machine() -> dict[str, Any]:
    """What a timed result depends on in addition: processor, threads and the kernel library."""
    processor = {name: value for name, value in hardware().items() if name != "memory_bytes"}
    return {**processor, "threads": num_threads(), "library": library.identity()}


@dataclass(frozen=True)
class JobResult:
    """The result of a job: JSON values, and an array of many numbers. What is kept of one also has a `state`."""

    figures: dict[str, Any] = field(default_factory=dict)
    values: NDArray[Any] = field(default_factory=lambda: numpy.empty(0, numpy.float32))
    state: Mapping[str, NDArray[Any]] = field(default_factory=dict)


class Folder:
    """A folder of ``--out``, created if missing (or DataError). Without a path it stores nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        if path is not None:
            with file_errors(f"--out {path}"):
                (path / "parts").mkdir(parents=True, exist_ok=True)

    def claim(self, run: Mapping[str, Any]) -> None:
        """Write the run record; raises DataError if the folder holds another comparison."""
        if self.path is None:
            return
        run = json.loads(json.dumps(run, default=str))
        path = self.path / RUN
        if path.exists():
            before = read_run_record(self.path)
            for name in {*before, *run} - {*_MAY_DIFFER, *_MAY_GROW}:
                if before.get(name) != run.get(name):
                    raise DataError(
                        f"--out {self.path} holds another run: its {name} is {before.get(name)}, here it is "
                        f"{run.get(name)}; choose another folder"
                    )
            if any(config not in run.get("cache", ()) for config in before.get("cache", ())):
                raise DataError(f"--out {self.path} holds policies that this run leaves out; choose another folder")
            if len(before.get("cache", ())) == len(run.get("cache", ())):
                return
        self.write(RUN, json.dumps(run, indent=1, ensure_ascii=False) + "\n")

    def load(self, key: Mapping[str, Any], kept: bool = False) -> JobResult | None:
        """The result stored under `key`, or what is kept of it; None if there is none that can be read."""
        path = self._path_of(key, kept)
        if path is None or not path.exists():
            return None
        try:
            with safe_open(path, "numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- no mapping
                return JobResult(json.loads(file.metadata()["figures"]), arrays.pop(_VALUES), arrays)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError):
            return None

    def has(self, key: Mapping[str, Any]) -> bool:
        """Whether there is a file for the result of `key`."""
        path = self._path_of(key)
        return path is not None and path.exists()

    def store(self, key: Mapping[str, Any], result: JobResult, kept: bool = False) -> None:
        """Store a result atomically, in place of what is kept of it, or store that; or raise DataError."""
        path = self._path_of(key, kept)
        if path is None:
            return
        metadata = {"figures": json.dumps(result.figures), "key": json.dumps(key, default=str)}
        with file_errors(f"--out {path}"):
            arrays = {_VALUES: result.values, **result.state}
            whole = {name: numpy.ascontiguousarray(array) for name, array in arrays.items()}
            write_atomically(path, save(whole, metadata))
            if not kept:
                path.with_suffix(_KEPT).unlink(missing_ok=True)

    def keep_records(self, run: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
        """Write all records, the run record first."""
        lines = [json.dumps(record, ensure_ascii=False, default=str) for record in (run, *records)]
        self.write(RECORDS, "\n".join(lines) + "\n")

    def write(self, name: str, text: str) -> None:
        """Write a file atomically; raises DataError if it cannot be written."""
        if self.path is None:
            return
        path = self.path / name
        with file_errors(f"--out {self.path}"):
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, text.encode())

    def _path_of(self, key: Mapping[str, Any], kept: bool = False) -> Path | None:
        return self.path and self.path / "parts" / f"{digest_of_key(key)}{_KEPT if kept else '.safetensors'}"


def digest_of_key(key: Mapping[str, Any]) -> str:
    """A digest of a job's key."""
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:20]
