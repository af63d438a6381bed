"""How far the jobs of a comparison are, and about how long the rest of them takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.progress import Progress

from h2o_stream.compare.comparison import Job, JobProgress
from h2o_stream.ui.format import format_duration
from h2o_stream.ui.terminal import Terminal

_NOTE_EVERY_S = 60.0
"""Seconds between two notes where no bar can be drawn."""

_MIN_ELAPSED_S = 3.0
"""Seconds after which an estimate means something."""


class TimeLeft:
    """Extrapolates from the jobs of this process; called with every `JobProgress`.

    Args:
        pending: the jobs without a stored result.
        count: all jobs.
        workers: processes that share them.
        clock: returns seconds.
    """

    def __init__(
        self, pending: Sequence[Job], count: int, workers: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._totals = {id(job): job.total for job in pending}
        self._done = dict.fromkeys(self._totals, 0)
        self._finished: set[int] = set()
        self.count, self._workers, self._clock, self._begun = count, workers, clock, clock()

    def __call__(self, job: Job, progress: JobProgress) -> None:
        """Note the progress of a job."""
        if id(job) in self._done:
            self._done[id(job)] = progress.done
        if progress.done >= job.total:
            self._finished.add(id(job))

    @property
    def finished(self) -> int:
        """Jobs that are done."""
        return len(self._finished)

    @property
    def seconds(self) -> float | None:
        """Estimated seconds until all jobs are done; None if it is too early to say."""
        elapsed, done = self._clock() - self._begun, sum(self._done.values())
        if elapsed < _MIN_ELAPSED_S or not done:
            return None
        left = sum(self._totals.values()) / self._workers - done
        return max(elapsed * left / done, 0.0)

    @property
    def text(self) -> str:
        """For people: ``3 of 12 jobs, about 4 min left``."""
        left = "" if self.seconds is None else f", about {format_duration(self.seconds)} left"
        return f"{self.finished} of {self.count} jobs{left}"


class Overview:
    """Shows the time left of a comparison: in a row above its bars, or in a note every minute.

    Args:
        name: of the comparison.
        left: is asked after each `JobProgress`.
        progress: its bars.
        terminal: gets the notes where bars cannot be drawn.
    """

    def __init__(self, name: str, left: TimeLeft, progress: Progress, terminal: Terminal) -> None:
        self._name, self._left, self._progress, self._terminal = name, left, progress, terminal
        self._task = progress.add_task(name, total=left.count)
        self._noted_at = time.monotonic()

    def __call__(self, job: Job, progress: JobProgress) -> None:
        """Note the progress of a job and show what is left."""
        self._left(job, progress)
        line = f"{self._name}: {self._left.text}"
        self._progress.update(self._task, completed=self._left.finished, description=line)
        if self._progress.disable and time.monotonic() - self._noted_at >= _NOTE_EVERY_S:
            self._terminal.note(line, style="dim")
            self._noted_at = time.monotonic()
