"""The interface of a comparison: jobs, which one process or several run, and records of their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, TypeVar

from h2o_stream.base.memory import format_bytes
from h2o_stream.base.processes import Processes
from h2o_stream.cache.source import policy_source
from h2o_stream.compare.folder import Folder, JobResult, digest_of_key, identity
from h2o_stream.compare.models import Models, digest_of_model, plan_for
from h2o_stream.compare.options import ComparisonOptions
from h2o_stream.compare.pause import Pause
from h2o_stream.config import AtContext, CacheConfig, EngineChoice, SamplingConfig
from h2o_stream.engine.engine import Engine
from h2o_stream.errors import H2OStreamError, means_out_of_memory
from h2o_stream.runtime.model import RuntimeModel

Notify = Callable[[str], None]
Options = TypeVar("Options", bound=ComparisonOptions)
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class JobProgress:
    """Units of `Job.total` that are done, and what the job is doing now.

    `keep`, if there is one, returns what an interrupted job has found; `Job.run` goes on when it is given that.
    """

    done: int
    text: str = ""
    keep: Callable[[], JobResult] | None = None


@dataclass(frozen=True)
class Job:
    """A unit of work of a comparison.

    Attributes:
        key: everything that the result depends on; a result stored under the same key is reused.
        total: final value of `JobProgress.done`.
        run: runs the job, from what an earlier run has kept if it is given that. Yields `JobProgress`, and last the
            result.
        subject: what `Comparison.leave_out` drops if the job fails: the policy, unless the comparison says otherwise.
    """

    label: str
    key: Mapping[str, Any]
    total: int
    run: Callable[..., Iterable[JobProgress | JobResult]]
    subject: Any = None


@dataclass(frozen=True)
class JobFailure:
    """The end of a job that could not run, with the reason in one line; None if an earlier failure explains it."""

    reason: str | None


class Comparison(ABC, Generic[Options]):
    """A question to be answered by measuring what the options say.

    Attributes:
        name: name of its subcommand, its records and its table.
        exclusive: whether its jobs are timed, so that only one may run at a time.
        native: whether it takes models without torch, too: `model_for` says which one serves a policy.
        model: model for most policies; transformers' unless the comparison is `native`.
    """

    name: ClassVar[str]
    exclusive: ClassVar[bool] = False
    native: bool = False

    def __init__(self, options: Options) -> None:
        self.options, self.configs = options, options.configs
        self.models: Models | None = None
        self.model: Any = None
        self.tokenizer: Any = None

    def load_model(self, notify: Notify) -> dict[str, Any]:
        """Load the model. Returns the settings of model and policies for the run record."""
        engine: EngineChoice = getattr(self.options, "engine", "auto") if self.native else "eager"
        self.models = models = Models(self.options.model, self.configs, engine, notify)
        self.model, self.tokenizer = models.first, models.tokenizer
        if not isinstance(self.model, RuntimeModel):
            self._set_positions(notify)
        settings = {"model": models.name, "identity": digest_of_model(self.model), **cache_settings(self.configs)}
        return {**settings, "engine": engine, "why_transformers": models.why_transformers} if self.native else settings

    def _set_positions(self, notify: Notify) -> None:
        """Say so if a model of transformers has no other positions than absolute ones."""
        from h2o_stream.attachment.support import with_default_positions
        from h2o_stream.cache.rope import ABSOLUTE_TAKEN

        before, self.configs = self.configs, [with_default_positions(self.model.config, one) for one in self.configs]
        if self.configs != before:
            notify(ABSOLUTE_TAKEN)

    def model_for(self, config: CacheConfig) -> tuple[Any, CacheConfig]:
        """The model that serves a policy, and the config to serve it with."""
        return self.models.of(config) if self.native and self.models else (self.model, config)

    def engine_for(self, config: CacheConfig, sampling: SamplingConfig, at_context: AtContext = "continue") -> Engine:
        """An engine that serves a policy; arguments as for `Engine`."""
        assert self.models is not None, "the model was loaded"
        model, config = self.model_for(config)
        return Engine(model, self.tokenizer, config, sampling, at_context, engine=self.models.engine, speculate="off")

    def key(self, config: CacheConfig, **settings: Any) -> dict[str, Any]:
        """The key of a job: its settings, and what else its result depends on."""
        return {"what": self.name, **settings, **identity(*self.model_for(config))}

    @abstractmethod
    def begin(self, notify: Notify) -> dict[str, Any]:
        """Load the model and the texts. Returns the settings for the run record."""

    @abstractmethod
    def jobs(self) -> Sequence[Job]:
        """The work, in order."""

    @abstractmethod
    def records(self, results: Iterable[JobResult]) -> Iterator[dict[str, Any]]:
        """The records, each as soon as the results it needs are there."""

    def leave_out(self, subject: Any) -> None:
        """Drop what a failed job measures, its `Job.subject`, from `jobs` and `records`; it may be dropped already."""
        self.configs = [config for config in self.configs if config != subject]

    def files(self) -> Iterable[tuple[str, str]]:
        """Names and texts of further files for the folder; called after `records` has ended."""
        return ()

    def close(self) -> None:
        """Release what `begin` and the jobs hold."""
        self.model = self.models = None


OnProgress = Callable[[Job, JobProgress], None]
OnFailure = Callable[[str, str], None]


def run_jobs(
    jobs: Sequence[Job], exclusive: bool, processes: Processes, run: Callable[[Job], Outcome]
) -> Iterator[Outcome]:
    """Run jobs, shared among the processes; one process runs them all if they are `exclusive`.

    Yields what `run` returns for each, in order, in every process.
    """
    if processes.count == 1 or processes.shares_model:
        yield from map(run, jobs)
        return
    workers = 1 if exclusive else processes.count
    outcomes = {number: run(job) for number, job in enumerate(jobs) if number % workers == processes.rank}
    gathered = processes.gather(outcomes)
    yield from (gathered[number] for number in range(len(jobs)))


def run_possible_jobs(
    comparison: Comparison[Any],
    jobs: Sequence[Job],
    processes: Processes,
    run: Callable[[Job], JobResult],
    on_failure: OnFailure,
) -> list[JobResult]:
    """Run the jobs of a comparison and leave out of it what fails. Returns the results of the jobs that it then has.

    `on_failure` is called with the label and the reason, in every process.

    Raises:
        H2OStreamError: nothing is left, or what failed cannot be left out.
    """
    remaining = set(map(_digest, jobs))

    def attempt(job: Job) -> JobResult | JobFailure:
        if _digest(job) not in remaining:
            return JobFailure(None)
        try:
            return run(job)
        except (H2OStreamError, MemoryError, RuntimeError) as error:
            if not isinstance(error, H2OStreamError) and not means_out_of_memory(error):
                raise
            comparison.leave_out(job.subject)
            remaining.intersection_update(map(_digest, comparison.jobs()))
            return JobFailure(reason_of(error))

    results: dict[str, JobResult] = {}
    for job, outcome in zip(jobs, run_jobs(jobs, comparison.exclusive, processes, attempt), strict=True):
        if isinstance(outcome, JobResult):
            results[_digest(job)] = outcome
        elif outcome.reason is not None:
            comparison.leave_out(job.subject)
            on_failure(job.label, outcome.reason)
    digests = list(map(_digest, comparison.jobs()))
    if not digests or not results.keys() >= set(digests):
        raise H2OStreamError("nothing can be measured without what failed")
    return [results[digest] for digest in digests]


def leave_out_unsupported(comparison: Comparison[Any], on_failure: OnFailure) -> None:
    """Leave out the policies that the model cannot have, such as windows beyond its context.

    A comparison that has not loaded the model in `begin` stays as it is. `on_failure` gets the label and the reason.
    """
    if comparison.model is None:
        return
    for config in list(comparison.configs):
        try:
            plan_for(*comparison.model_for(config))
        except H2OStreamError as error:
            comparison.leave_out(config)
            on_failure(label_of(config), str(error))


def reason_of(error: BaseException) -> str:
    """Why something could not be measured, in one line."""
    message = " ".join(str(error).split())
    if isinstance(error, H2OStreamError):
        return message
    kind = "out of memory" if means_out_of_memory(error) else f"unexpected {type(error).__name__}"
    return f"{kind}: {message}"


def _digest(job: Job) -> str:
    return digest_of_key(job.key)


def run_job(folder: Folder, on_progress: OnProgress, pause: Pause, job: Job) -> JobResult:
    """Run a job, or load its result from the folder. An interrupted one keeps there what it can go on from."""
    on_progress(job, JobProgress(0))
    result = folder.load(job.key)
    if result is None:
        kept = folder.load(job.key, kept=True)
        for event in job.run() if kept is None else job.run(kept):
            if isinstance(event, JobResult):
                result = event
                continue
            on_progress(job, event)
            pause.keeps = event.keep is not None and folder.path is not None
            if event.keep and pause.requested:
                folder.store(job.key, event.keep(), kept=True)
                pause.end()
        pause.keeps = False
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
    size = "" if config.cache_size is None else format_bytes(config.cache_size)
    auto = "auto" if config.auto_window else ""
    return f"{config.label} {config.ratios_text or size or auto or window_of(config) or ''}".strip()


def window_of(config: CacheConfig) -> int | None:
    """The window; None for a full cache, which has none, and if ratios, a size or the model choose it."""
    chosen = config.by_ratio or config.cache_size is not None or config.auto_window
    return None if config.policy == "full" or chosen else config.window
