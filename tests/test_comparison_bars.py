"""How long comparisons still take, and their bars."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from h2o_stream.base.processes import Processes
from h2o_stream.compare.catalog import NllOptions
from h2o_stream.compare.comparison import Job, JobProgress
from h2o_stream.config import ModelConfig
from h2o_stream.session.jsonl import JsonlWriter
from h2o_stream.ui.comparison import _Bars, _Total, run_comparison
from h2o_stream.ui.terminal import Terminal


def test_the_time_left_is_that_of_the_jobs_that_run(
    tiny_folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: jobs were made twice, and the estimate, which knows them by identity, stayed empty."""
    monkeypatch.setattr("h2o_stream.ui.comparison._NOTE_EVERY_S", 0.0)
    options = NllOptions(
        text=(text,), tokens=60, policies=("sink", "recent"), windows=(16,), model=ModelConfig(str(tiny_folder))
    )
    run_comparison(options.make(), None, Terminal(), JsonlWriter(None), Processes(), lambda *item: None)
    assert "nll: 2 of 2 jobs, about 0 s left\n" in capsys.readouterr().err


def test_the_bar_of_the_job_that_runs_is_on_the_screen() -> None:
    """Regression: 35 bars stood below each other, and a terminal of 24 lines showed the first."""
    jobs = [Job(str(number), {"number": number}, 10, list) for number in range(35)]
    progress = Progress(console=Console(file=io.StringIO(), height=24))
    progress.add_task("nll")
    bars = _Bars(jobs, progress)
    for job in jobs:
        bars(job, JobProgress(0))
        shown = [task.description for task in progress.tasks if task.visible]
        assert shown[0] == "nll"
        assert shown[-1] == job.label
        assert len(shown) < 24
        bars(job, JobProgress(10))
    assert len(shown) > 20, "room is used"


def test_a_bar_is_full_only_when_its_jobs_are_done() -> None:
    """Jobs report their own completion, which is then reported once more."""
    jobs = [Job("same", {}, 4, list), Job("same", {}, 6, list), Job("other", {}, 1, list)]
    with Progress(disable=True) as progress:
        bars = _Bars(jobs, progress)
        for job in jobs[:2]:
            for done in (0, 2, job.total, job.total):
                bars(job, JobProgress(done))
            assert progress.tasks[0].completed == (4 if job is jobs[0] else 10)
        assert [task.total for task in progress.tasks] == [10]


class TestTimeLeft:
    @pytest.fixture(autouse=True)
    def _notes_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("h2o_stream.ui.comparison._NOTE_EVERY_S", 0.0)

    @staticmethod
    def notes(
        capsys: pytest.CaptureFixture[str],
        totals: list[int],
        *done: tuple[float, int, int],
        stored: int = 0,
        workers: int = 1,
    ) -> list[str]:
        """The notes after each progress: (second, job, done)."""
        jobs = [Job(str(number), {"number": number}, total, list) for number, total in enumerate(totals)]
        clock = [0.0]
        with Progress(disable=True, get_time=lambda: clock[0], speed_estimate_period=600.0) as progress:
            show = _Total("nll", jobs[stored:], len(jobs), workers, progress, Terminal())
            for second, job, amount in done:
                clock[0] = second
                show(jobs[job], JobProgress(amount))
        return capsys.readouterr().err.splitlines()

    def test_it_is_in_proportion_to_the_work(self, capsys: pytest.CaptureFixture[str]) -> None:
        notes = self.notes(capsys, [100, 300], (0, 0, 0), (10, 0, 25), (20, 0, 50), (40, 0, 100))
        assert notes[0] == "nll: 0 of 2 jobs"
        assert notes[2] == "nll: 0 of 2 jobs, about 2 min left"
        assert notes[3] == "nll: 1 of 2 jobs, about 2 min left"

    def test_stored_results_do_not_count_as_fast(self, capsys: pytest.CaptureFixture[str]) -> None:
        notes = self.notes(capsys, [100, 100], (0, 0, 100), (0, 1, 1), (10, 1, 11), stored=1)
        assert notes[0] == "nll: 1 of 2 jobs"
        assert notes[-1] == "nll: 1 of 2 jobs, about 89 s left"

    def test_several_processes_share_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        notes = self.notes(capsys, [100, 100], (0, 0, 1), (10, 0, 51), workers=2)
        assert notes[-1] == "nll: 0 of 2 jobs, about 10 s left"

    def test_hours(self, capsys: pytest.CaptureFixture[str]) -> None:
        notes = self.notes(capsys, [10_000], (0, 0, 1), (100, 0, 2))
        assert notes[-1].endswith(" h left")
