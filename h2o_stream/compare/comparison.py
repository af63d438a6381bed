"""The interface of a comparison: jobs, which one process or several run, and records of their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, TypeVar

from h2o_stream.cache.identity import model_digest, policy_source
from h2o_stream.compare.folder import Folder, JobResult, identity
from h2o_stream.compare.options import ComparisonOptions
from h2o_stream.config import CacheConfig
from h2o_stream.models.load import load
from h2o_stream.processes import Processes

Notify = Callable[[str], None]
Options = TypeVar("Options", bound=ComparisonOptions)


@dataclass(frozen=True)
class JobProgress:
    """The progress of a job.

    Attributes:
        done: units done, of `Job.total`.
        text: what it is doing now, in addition to the job's label.
    """

    done: int
    text: str = ""


@dataclass(frozen=True)
class Job:
    """A unit of work of a comparison.

    Attributes:
        label: for people.
        key: everything that the result depends on; a result stored under the same key is reused.
        total: final value of `JobProgress.done`.
        run: runs the job. Yields `JobProgress`, and last the result.
    """

    label: str
    key: Mapping[str, Any]
    total: int
    run: Callable[[], Iterable[JobProgress | JobResult]]


class Comparison(ABC, Generic[Options]):
    """A question to be answered by measuring.

    Args:
        options: what is measured.

    Attributes:
        name: of its subcommand, its records and its table.
        exclusive: whether its jobs are timed, so that only one may run at a time.
    """

    name: ClassVar[str]
    exclusive: ClassVar[bool] = False

    def __init__(self, options: Options) -> None:
        self.options, self.configs = options, options.configs
        self.model: Any = None
        self.tokenizer: Any = None

    def load_model(self, notify: Notify) -> dict[str, Any]:
        """Load the model. Returns the settings of model and policies for the run record."""
        loaded = load(self.options.model, notify=notify)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        return {"model": loaded.name, "identity": model_digest(self.model), **cache_settings(self.configs)}

    def key(self, config: CacheConfig, **settings: Any) -> dict[str, Any]:
        """The key of a job: its settings, and what else its result depends on."""
        return {"what": self.name, **settings, **identity(self.model, config)}

    @abstractmethod
    def begin(self, notify: Notify) -> dict[str, Any]:
        """Load the model and the texts. Returns the settings for the run record."""

    @abstractmethod
    def jobs(self) -> Sequence[Job]:
        """The work, in order."""

    @abstractmethod
    def records(self, results: Iterable[JobResult]) -> Iterator[dict[str, Any]]:
        """The records, each as soon as the results it needs are there."""

    def files(self) -> Iterable[tuple[str, str]]:
        """Names and texts of further files for the folder; called after `records` has ended."""
        return ()

    def close(self) -> None:
        """Release what `begin` and the jobs hold."""


OnProgress = Callable[[Job, JobProgress], None]


def run_jobs(
    jobs: Sequence[Job], exclusive: bool, folder: Folder, processes: Processes, on_progress: OnProgress
) -> Iterator[JobResult]:
    """Run the jobs without a stored result, shared among the processes. Yields all results in order, in every process.

    Args:
        jobs: of a comparison.
        exclusive: whether one process has to run them all.
        folder: stores results.
        processes: share the jobs.
        on_progress: called for the jobs of this process.
    """
    if processes.count == 1 or processes.shares_model:
        yield from (_run_job(job, folder, on_progress) for job in jobs)
        return
    workers = 1 if exclusive else processes.count
    results = {
        number: _run_job(job, folder, on_progress)
        for number, job in enumerate(jobs)
        if number % workers == processes.rank
    }
    gathered = processes.gather(results)
    yield from (gathered[number] for number in range(len(jobs)))


def _run_job(job: Job, folder: Folder, on_progress: OnProgress) -> JobResult:
    on_progress(job, JobProgress(0))
    result = folder.load(job.key)
    if result is None:
        for event in job.run():
            if isinstance(event, JobResult):
                result = event
            else:
                on_progress(job, event)
        assert result is not None, "a job ends with its result"
        folder.store(job.key, result)
    on_progress(job, JobProgress(job.total))
    return result


def cache_settings(configs: Sequence[CacheConfig]) -> dict[str, Any]:
    """The settings of the policies, for the run record."""
    return {
        "policy": [config.policy for config in configs],
        "window": [window_of(config) for config in configs],
        "seed": [config.seed for config in configs],
        "cache": [_cache(config) for config in configs],
    }


def _cache(config: CacheConfig) -> dict[str, Any]:
    """The settings of a policy, with a digest of its source if it is not ours: an edited policy is another one."""
    source = policy_source(config.plan())
    return {**asdict(config), "source": source} if source else asdict(config)


def label_of(config: CacheConfig) -> str:
    """Policy, seed and window, for people."""
    return f"{config.label} {window_of(config) or ''}".strip()


def window_of(config: CacheConfig) -> int | None:
    """The window; None for a full cache, which has none."""
    return None if config.policy == "full" else config.window
