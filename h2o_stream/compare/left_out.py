"""What could not be measured, and why: a file in the folder of ``h2o-compare all``, which its report lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from h2o_stream.errors import DataError
from h2o_stream.resources import write_text
from h2o_stream.session.jsonl import jsonl_text, read_objects

_FILE = "left-out.jsonl"


@dataclass(frozen=True)
class LeftOut:
    """A part of ``all`` that could not be measured, and why in one line. `job` is None if the whole comparison is
    missing.
    """

    comparison: str
    job: str | None
    reason: str

    @property
    def record(self) -> dict[str, Any]:
        """As a line of JSON."""
        return {"type": "left-out", **asdict(self)}


def write_left_out(folder: Path, left_out: Iterable[LeftOut]) -> None:
    """Write what is left out of a folder of comparisons, in place of an earlier run's.

    Raises:
        DataError: the file cannot be written.
    """
    write_text(folder / _FILE, jsonl_text(item.record for item in left_out), "--out")


def read_left_out(folder: Path) -> list[LeftOut]:
    """What is left out of a folder; nothing if it has no such file.

    Raises:
        DataError: the file is damaged.
    """
    path = folder / _FILE
    if not path.exists():
        return []
    try:
        records = [record for _, record in read_objects(path, "report")]
        return [LeftOut(record["comparison"], record["job"], record["reason"]) for record in records]
    except KeyError as error:
        raise DataError(f"{path}: a line has no {error}") from error


def lines_of(left_out: Sequence[LeftOut]) -> list[str]:
    """A line for each comparison and reason, with all jobs that it concerns."""
    jobs: dict[tuple[str, str], list[str]] = {}
    for item in left_out:
        jobs.setdefault((item.comparison, item.reason), []).extend([item.job] if item.job else [])
    return [
        f"{', '.join(dict.fromkeys([comparison, *labels]))}: {reason}" for (comparison, reason), labels in jobs.items()
    ]
