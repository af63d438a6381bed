"""The folder of a comparison: what ran, every finished part, and in the end its records, tables and plots.

Nothing measured in it is ever overwritten: the same comparison goes on where it was, with more policies if asked, and
another one is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from h2o_stream.cache.identity import model_digest, policy_source
from h2o_stream.cache.support import check_supported
from h2o_stream.config import CacheConfig
from h2o_stream.errors import DataError
from h2o_stream.native import library
from h2o_stream.session.run_record import RECORDS, RUN, hardware, read_run_record

_MAY_DIFFER = ("versions", "hardware", "command_line", "begun", "processes")
"""What the run record tells of circumstances, not of what is compared; what is timed has `machine` beside them."""

_MAY_GROW = ("cache", "policy", "window", "seed")
"""What it tells of each policy."""


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what goes wrong while writing into a folder of ``--out`` into a line that names it.

    Raises:
        DataError: something could not be written.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"--out {folder}: {error.strerror or error}") from error


def identity(model: Any, config: CacheConfig) -> dict[str, Any]:
    """What a figure is a figure of: model, dtype, the policy as asked for and as this version understands it."""
    plan = check_supported(type(model), model.config, config)
    return {
        "model": model_digest(model),
        "dtype": str(model.dtype),
        "config": asdict(config),
        "plan": asdict(plan),
        "source": policy_source(plan),
        "version": version("h2o-stream"),
    }


def machine() -> dict[str, Any]:
    """What a timed figure is a figure of besides: processor, threads, and the library that computes."""
    own = {name: value for name, value in hardware().items() if name != "memory_bytes"}
    return {**own, "threads": torch.get_num_threads(), "library": library.identity()}


@dataclass(frozen=True)
class Part:
    """What one job of a comparison found.

    Attributes:
        figures: as JSON knows them.
        values: numbers by the thousand.
    """

    figures: dict[str, Any] = field(default_factory=dict)
    values: Tensor = field(default_factory=lambda: torch.empty(0))


class Folder:
    """A folder of ``--out``, made when it is not there.

    Args:
        path: where; None keeps nothing.

    Raises:
        DataError: it cannot be made.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        if path is not None:
            with writing(path):
                (path / "parts").mkdir(parents=True, exist_ok=True)

    def claim(self, run: Mapping[str, Any]) -> None:
        """Say what runs here.

        Args:
            run: the run record.

        Raises:
            DataError: something else ran here before.
        """
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

    def load(self, key: Mapping[str, Any]) -> Part | None:
        """What is stored under `key`; None if that part is not finished, or not readable."""
        path = self._part(key)
        if path is None or not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                return Part(json.loads(file.metadata()["figures"]), file.get_tensor("values"))
        except (SafetensorError, OSError, KeyError, TypeError, ValueError):
            return None

    def store(self, key: Mapping[str, Any], part: Part) -> None:
        """Keep a finished part; it appears whole or not at all.

        Raises:
            DataError: it cannot be written.
        """
        path = self._part(key)
        if path is None:
            return
        scratch = path.with_suffix(f".{os.getpid()}")
        told = {"figures": json.dumps(part.figures), "key": json.dumps(key, default=str)}
        try:
            save_file({"values": part.values.contiguous()}, scratch, told)
            scratch.replace(path)
        except (OSError, SafetensorError) as error:
            raise DataError(f"--out {path}: {error}") from error

    def keep_records(self, run: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
        """Write all records, the run's first."""
        lines = [json.dumps(record, ensure_ascii=False, default=str) for record in (run, *records)]
        self.write(RECORDS, "\n".join(lines) + "\n")

    def write(self, name: str, text: str) -> None:
        """Write a file; it appears whole or not at all.

        Raises:
            DataError: it cannot be written.
        """
        if self.path is None:
            return
        path = self.path / name
        with writing(self.path):
            path.parent.mkdir(exist_ok=True)
            scratch = path.with_name(f".{path.name}.partial")
            scratch.write_text(text, encoding="utf-8")
            scratch.replace(path)

    def _part(self, key: Mapping[str, Any]) -> Path | None:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:20]
        return self.path and self.path / "parts" / f"{digest}.safetensors"
