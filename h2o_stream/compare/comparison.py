"""What all comparisons are: jobs done one by one, in one process or in several, and records of what came out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from h2o_stream.cache.identity import policy_source
from h2o_stream.compare.folder import Folder, Part
from h2o_stream.compare.options import ComparisonOptions
from h2o_stream.config import CacheConfig
from h2o_stream.processes import Processes

Notify = Callable[[str], None]
Options = TypeVar("Options", bound=ComparisonOptions)


@dataclass(frozen=True)
class Doing:
    """How far a job has come.

    Attributes:
        done: of `Job.total`.
        text: what is going on, if there is more to say than the job's label.
    """

    done: int
    text: str = ""


@dataclass(frozen=True)
class Job:
    """A piece of a comparison that is done as a whole.

    Attributes:
        label: for people.
        key: of what its outcome is the outcome; the same again is taken from the folder.
        total: what `Doing.done` comes to.
        run: does it. Yields `Doing`, and last the outcome.
    """

    label: str
    key: Mapping[str, Any]
    total: int
    run: Callable[[], Iterable[Doing | Part]]


class Comparison(ABC, Generic[Options]):
    """A question to be answered by measuring.

    Args:
        options: what is measured.

    Attributes:
        name: of its subcommand, its records and its table.
        alone: whether its jobs must not run at the same time, because they are timed.
    """

    name: ClassVar[str]
    alone: ClassVar[bool] = False

    def __init__(self, options: Options) -> None:
        self.options, self.configs = options, options.configs

    @abstractmethod
    def begin(self, notify: Notify) -> dict[str, Any]:
        """Get ready: load the model, read the texts. Returns what the run record tells."""

    @abstractmethod
    def jobs(self) -> Sequence[Job]:
        """What is to be done, in order."""

    @abstractmethod
    def records(self, parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
        """The records, one by one as the outcomes of the jobs come in."""

    def files(self) -> Iterable[tuple[str, str]]:
        """Names and texts of further files for the folder, when all records were given."""
        return ()

    def close(self) -> None:
        """Give back what `begin` and the jobs took."""


class Watcher(Protocol):
    """Who is told about jobs."""

    def __call__(self, job: Job, doing: Doing) -> None:
        """A job has come so far."""


def outcomes(jobs: Sequence[Job], alone: bool, folder: Folder, processes: Processes, watch: Watcher) -> Iterator[Part]:
    """Do what is not done yet, each process its part of it, and give every outcome in order, in every process.

    Args:
        jobs: of a comparison.
        alone: whether one process has to do them all.
        folder: has what was finished before, and gets what is now.
        processes: that share the work.
        watch: is told about the jobs of this process.
    """
    if processes.count == 1 or processes.together:
        yield from (_outcome(job, folder, watch) for job in jobs)
        return
    workers = 1 if alone else processes.count
    own = {
        number: _outcome(job, folder, watch) for number, job in enumerate(jobs) if number % workers == processes.rank
    }
    gathered = processes.gather(own)
    yield from (gathered[number] for number in range(len(jobs)))


def _outcome(job: Job, folder: Folder, watch: Watcher) -> Part:
    watch(job, Doing(0))
    part = folder.load(job.key)
    if part is None:
        for event in job.run():
            if isinstance(event, Part):
                part = event
            else:
                watch(job, event)
        assert part is not None, "a job ends with its outcome"
        folder.store(job.key, part)
    watch(job, Doing(job.total))
    return part


def told(configs: Sequence[CacheConfig]) -> dict[str, Any]:
    """What the run record tells of the policies."""
    return {
        "policy": [config.policy for config in configs],
        "window": [window_of(config) for config in configs],
        "seed": [config.seed for config in configs],
        "cache": [_cache(config) for config in configs],
    }


def _cache(config: CacheConfig) -> dict[str, Any]:
    """The policy, and where it is a user's, its source: an edited one is another."""
    source = policy_source(config.plan())
    return {**asdict(config), "source": source} if source else asdict(config)


def label_of(config: CacheConfig) -> str:
    """Policy, seed and window, for people."""
    return f"{config.label} {window_of(config) or ''}".strip()


def window_of(config: CacheConfig) -> int | None:
    """The window, which a full cache has not."""
    return None if config.policy == "full" else config.window
