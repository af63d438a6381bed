"""Runs comparisons: progress bars, records as they come, tables at the end, and a folder with all of it."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from h2o_stream.base.processes import Processes
from h2o_stream.base.resources import replace_surrogates
from h2o_stream.compare.comparison import (
    Comparison,
    Job,
    JobProgress,
    OnFailure,
    OnProgress,
    leave_out_unsupported,
    run_job,
    run_jobs,
    run_possible_jobs,
)
from h2o_stream.compare.folder import Folder, JobResult
from h2o_stream.compare.options import RUNNERS
from h2o_stream.compare.pause import Pause
from h2o_stream.errors import file_errors
from h2o_stream.session.jsonl import JsonlWriter
from h2o_stream.session.run_record import run_record
from h2o_stream.ui.format import format_duration
from h2o_stream.ui.pages import Page, Record, page_of
from h2o_stream.ui.plots import draw
from h2o_stream.ui.tables import data_table, markdown_page
from h2o_stream.ui.terminal import Terminal

_NOTE_EVERY_S = 60.0
"""Seconds between two notes where no bar can be drawn."""

_ESTIMATED_OVER_S = 600.0
"""The time left is estimated from the speed of so many seconds, because jobs differ in theirs."""


def run_comparison(
    comparison: Comparison[Any],
    out: Path | None,
    terminal: Terminal,
    jsonl: JsonlWriter,
    processes: Processes,
    on_failure: OnFailure | None = None,
) -> None:
    """Run a comparison and show it. Its folder, from which an interrupted one resumes, and `jsonl` get its records.

    With `on_failure` jobs that cannot run are left out, and it is called with their label and the reason. Records then
    come when all jobs are done.

    Raises:
        DataError: the folder cannot be written, or holds another run.
        H2OStreamError: the comparison failed.
    """
    with closing(comparison):
        folder = Folder(out)
        invocation = {
            "command_line": ["h2o-compare", *map(replace_surrogates, sys.argv[1:])],
            "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        run = run_record(
            f"h2o-compare {comparison.name}", **comparison.begin(terminal.note), **invocation, processes=processes.count
        )
        if processes.main:
            folder.claim(run)
        jsonl.write(run)
        records: list[dict[str, Any]] = []
        with progress_bars(terminal) as progress, _pause(comparison.name, out, run, records, terminal) as pause:
            if on_failure is not None:
                leave_out_unsupported(comparison, on_failure)
            jobs = comparison.jobs()
            on_progress = _display(comparison, jobs, folder, processes, progress, terminal)
            run_one = partial(run_job, folder, on_progress, pause)
            results: Iterable[JobResult]
            if comparison.options.ray:
                results = RUNNERS["ray"](comparison.options, jobs, folder, on_progress, terminal.note)
            elif on_failure is None:
                results = run_jobs(jobs, comparison.exclusive, processes, run_one)
            else:
                results = run_possible_jobs(comparison, jobs, processes, run_one, on_failure)
            for record in comparison.records(results):
                jsonl.write(record)
                records.append(record)
        if not processes.main:
            return
        page = page_of(comparison.name, run, records)
        if out is not None:
            folder.keep_records(run, records)
            folder.write(f"{comparison.name}.md", markdown_page(page))
            for name, text in comparison.files():
                folder.write(name, text)
            with file_errors(f"--out {out}"):
                for chart in page.charts:
                    draw(chart, out / f"{chart.name}.png")
            terminal.note(f"tables, plots and records are in {out}")
    print_page(page, terminal)


@contextmanager
def _pause(kind: str, out: Path | None, run: Record, records: Sequence[Record], terminal: Terminal) -> Iterator[Pause]:
    """A block that an interrupted comparison leaves by saying how to go on; without a folder it shows `records`."""
    try:
        with Pause(lambda: terminal.note("keeping what is finished; once more ends at once", style="dim")) as pause:
            yield pause
    except (KeyboardInterrupt, SystemExit):
        if out is not None:
            terminal.note(f"interrupted; what is finished is in {out}, and the same command goes on from there")
        else:
            terminal.note("interrupted; only with --out FOLDER is anything kept, to go on from there")
            with suppress(LookupError, ValueError):  # too few records for a page
                print_page(page_of(kind, run, records), terminal)
        raise


def print_page(page: Page, terminal: Terminal) -> None:
    """Print a page on stderr."""
    if terminal.quiet:
        return
    legend = f" ({page.legend})" if page.legend else ""
    terminal.console.print(f"{page.title}{legend}", markup=False, highlight=False)
    for table in page.tables:
        terminal.console.print(data_table(table, terminal.console.width))
    if page.verdict:
        terminal.console.print(page.verdict, style="bold", markup=False, highlight=False)


def progress_bars(terminal: Terminal) -> Progress:
    """A context manager for progress bars, which are hidden without a live terminal."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=terminal.console,
        speed_estimate_period=_ESTIMATED_OVER_S,
        disable=terminal.quiet or not terminal.live,
    )


def _display(
    comparison: Comparison[Any],
    jobs: Sequence[Job],
    folder: Folder,
    processes: Processes,
    progress: Progress,
    terminal: Terminal,
) -> OnProgress:
    """A row with the time left of all jobs, above a bar for each label."""
    workers = 1 if comparison.exclusive or processes.shares_model else processes.count
    pending = [job for job in jobs if not folder.has(job.key)]
    total, bars = _Total(comparison.name, pending, len(jobs), workers, progress, terminal), _Bars(jobs, progress)

    def show(job: Job, event: JobProgress) -> None:
        total(job, event)
        bars(job, event)

    return show


class _Total:
    """A bar for all jobs of this process, with the time left; where no bar can be drawn, a note every minute.

    Only the pending jobs, those without a stored result, count as work; `workers` processes share them.
    """

    def __init__(
        self, name: str, pending: Sequence[Job], count: int, workers: int, progress: Progress, terminal: Terminal
    ) -> None:
        self._name, self._count, self._progress, self._terminal = name, count, progress, terminal
        self._done = {id(job): 0 for job in pending}
        self._finished: set[int] = set()
        self._task = progress.add_task(name, total=sum(job.total for job in pending) / workers)
        self._noted_at = time.monotonic()

    def __call__(self, job: Job, event: JobProgress) -> None:
        if id(job) in self._done:
            self._done[id(job)] = event.done
        if event.done >= job.total:
            self._finished.add(id(job))
        line = f"{self._name}: {len(self._finished)} of {self._count} jobs"
        self._progress.update(self._task, completed=sum(self._done.values()), description=line)
        if self._progress.disable and time.monotonic() - self._noted_at >= _NOTE_EVERY_S:
            time_left = next(task.time_remaining for task in self._progress.tasks if task.id == self._task)
            self._terminal.note(
                line + ("" if time_left is None else f", about {format_duration(time_left)} left"), style="dim"
            )
            self._noted_at = time.monotonic()


class _Bars:
    """One progress bar for all jobs of a label, as many as the screen has room for."""

    def __init__(self, jobs: Sequence[Job], progress: Progress) -> None:
        self._progress, self._tasks = progress, dict[str, TaskID]()
        self._totals: dict[str, int] = defaultdict(int)
        self._done: dict[str, dict[int, int]] = defaultdict(dict)
        for job in jobs:
            self._totals[job.label] += job.total

    def __call__(self, job: Job, progress: JobProgress) -> None:
        if job.label not in self._tasks:
            self._make_room()
            self._tasks[job.label] = self._progress.add_task(job.label, total=self._totals[job.label])
        done = self._done[job.label]
        done[id(job)] = progress.done
        description = f"{job.label} {progress.text}".strip()
        self._progress.update(self._tasks[job.label], completed=sum(done.values()), description=description)

    def _make_room(self) -> None:
        """Hide the oldest bars that are full, so that the next one is seen."""
        shown = [task for task in self._progress.tasks if task.visible]
        full = [task.id for task in shown if task.id in self._tasks.values() and task.finished]
        for task in full[: max(len(shown) + 2 - self._progress.console.height, 0)]:
            self._progress.update(task, visible=False)
