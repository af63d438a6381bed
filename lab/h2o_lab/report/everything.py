"""The options of ``h2o-compare all`` and ``h2o-compare report``; what could not be measured, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from h2o_stream.base.options import Option
from h2o_stream.base.processes import Processes
from h2o_stream.base.resources import python_manual, require_matplotlib, write_text
from h2o_stream.base.texts import read_text
from h2o_stream.cli.run import loading
from h2o_stream.compare.catalog import COMPARISONS
from h2o_stream.compare.options import ComparisonOptions, sets_window
from h2o_stream.config import POLICIES, EngineChoice, ModelConfig
from h2o_stream.errors import DataError
from h2o_stream.session.jsonl import JsonlWriter, jsonl_text, read_objects

if TYPE_CHECKING:
    from h2o_stream.ui.terminal import Terminal


@dataclass(frozen=True, kw_only=True)
class AllOptions:
    """nll, recall, summarize, speed and throughput, and one report of them (extras "plots" and "rouge").

    Any model that --model takes. What it, its tokenizer, the memory or the installation does not allow is left out,
    and the report says why. An interrupted run resumes.
    """

    out: Annotated[Path, Option("Folder for a folder of each comparison, and for the reports.")]
    quick: Annotated[bool, Option("Small sizes: minutes on a laptop.")] = False
    text: Annotated[Path | None, Option("A text file. (default: the manual of Python)")] = None
    requests: Annotated[Path | None, Option("Requests in JSON Lines. (default: eight of our own)")] = None
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: Mapping[str, Any] = field(default_factory=dict)
    engine: EngineChoice = "auto"

    def comparisons(self) -> dict[str, ComparisonOptions]:
        """The options of each, by name; raises DataError if a text cannot be read, or the folder not be written."""
        text = self.text or manual_file(self.out)
        read_text(text, f"--text {text}")  # so that a missing file is reported before the model is loaded
        inputs: dict[str, Any] = {"text": text, "requests": self.requests, "engine": self.engine}
        chosen: dict[str, ComparisonOptions] = {}
        for name, options in COMPARISONS.items():
            if options.in_all is None:
                continue
            sizes = options.in_all.quick if self.quick else options.in_all.thorough
            taken = inputs.keys() & {field.name for field in fields(options)}
            values = {**{key: inputs[key] for key in taken}, **sizes}
            if name == "nll":
                values |= {"text": (text,), "policies": tuple(POLICIES)}
            if sets_window(self.cache):
                values.pop("windows", None)
            chosen[name] = options(out=self.out / name, model=self.model, cache=self.cache, **values)
        return chosen

    def run(self, terminal: Terminal, records: JsonlWriter) -> None:
        """Run them, and write reports."""
        require_matplotlib()
        with loading(self.model, terminal):
            from h2o_lab.report.run import run_everything
        run_everything(self, terminal, records, Processes(shares_model=self.model.tensor_parallel))


def manual_file(folder: Path) -> Path:
    """The manual of Python, as a file in a folder."""
    path = folder / "manual.txt"
    write_text(path, python_manual(), "--out")
    return path


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
    """Write what is left out of a folder of comparisons, in place of an earlier run's, or raise DataError."""
    write_text(folder / _FILE, jsonl_text(item.record for item in left_out), "--out")


def read_left_out(folder: Path) -> list[LeftOut]:
    """What is left out of a folder; nothing if it has no such file. Raises DataError if the file is damaged."""
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


@dataclass(frozen=True)
class ReportOptions:
    """One page of finished comparisons: tables and charts, settings, commands and machine.

    HTML that needs nothing from outside, light or dark as the reader likes it (extra "plots"), Markdown, or the tables
    alone as CSV or LaTeX, as the name of the file says.
    """

    folders: Annotated[
        list[Path], typer.Argument(help="Folders of --out, or folders of such folders.", show_default=False)
    ]
    to: Annotated[Path, Option("The file: .html, .md, .csv or .tex.")] = Path("report.html")

    def run(self, terminal: Terminal, records: JsonlWriter) -> None:
        """Write the report."""
        from h2o_lab.report.report import read_comparisons, write_report

        left_out = [item for folder in self.folders for item in read_left_out(folder)]
        write_report(read_comparisons(self.folders), self.to, left_out)
        terminal.note(f"the report is {self.to}")
