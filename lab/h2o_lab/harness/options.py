"""The options of ``h2o-compare tasks``: the lm-evaluation-harness's tasks, those after RULER, and a book."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from h2o_lab.harness.command import require_harness
from h2o_lab.ruler.items import TASKS
from h2o_lab.ruler.options import RulerOptions
from h2o_stream.base.options import Option, listed_if_any
from h2o_stream.base.registry import resolve
from h2o_stream.compare.options import Policies, Ray, configs_of, windows_if_any
from h2o_stream.config import DEFAULT_WINDOW, CacheConfig, EngineChoice
from h2o_stream.errors import ConfigError

HARNESS_TASKS = ("h2o_facts", "h2o_topics", "h2o_causes")
"""Small tasks of our own in the harness's format."""

Suite = Literal["harness", "ruler", "book"]

_ONLY: dict[str, tuple[Suite, ...]] = {
    **dict.fromkeys(("ratio", "task_folder", "shots", "limit"), ("harness",)),
    **dict.fromkeys(("forms", "depths", "items", "haystack", "text", "seed"), ("ruler",)),
    **dict.fromkeys(("lengths", "recall"), ("ruler", "book")),
    "tasks": ("harness", "ruler"),
}
"""Fields that only some suites have."""

_SUITES: dict[Suite, str] = {
    "harness": "h2o_lab.harness.tasks:Tasks",
    "ruler": "h2o_lab.ruler.suite:Ruler",
    "book": "h2o_lab.book.suite:Book",
}


@dataclass(frozen=True, kw_only=True)
class TasksOptions(RulerOptions):
    """Accuracy on tasks: the lm-evaluation-harness's (extra "eval"), those of RULER, or questions about a book.

    harness: a context is read whole and then evicted; answers are scored under eviction. h2o_facts, h2o_topics and
    h2o_causes are small tasks of our own. The harness's tasks need their data on this machine, or the network.

    ruler: needles, chains of variables and word counts in contexts of any length, made from code and a text. They are
    read and answered under eviction, in one turn or in a conversation that goes on. Needs no extra.

    book: questions about the manual of Python in other words than its own, each asked after the part that answers it,
    or the whole manual, was read once. Needs no extra.
    """

    comparison = _SUITES["harness"]
    page = "h2o_lab.harness.page:page"

    suite: Annotated[Suite, Option("Which tasks there are.")] = "harness"
    tasks: Annotated[
        Sequence[str], Option("Names of tasks, separated by commas. (default: ours, all)", parse=listed_if_any)
    ] = ()
    policies: Policies = ("full", "recent", "h2o")
    ratio: Annotated[float | None, Option("harness: window, as a fraction of each context.", min=0, max=1)] = 0.2
    windows: Annotated[
        Sequence[int | str],
        Option("Windows, separated by commas; auto as in h2o-chat; replaces --ratio.", parse=windows_if_any),
    ] = ()
    task_folder: Annotated[Path | None, Option("harness: folder with more tasks, in its format.")] = None
    shots: Annotated[int | None, Option("harness: examples before each question. (default: the task's)", min=0)] = None
    limit: Annotated[int | None, Option("harness: documents; default is all.", min=1)] = None
    ray: Ray = None
    engine: EngineChoice = "auto"

    def __post_init__(self) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        for name, suites in _ONLY.items():
            if self.suite not in suites and getattr(self, name) != defaults[name]:
                flag = "--form" if name == "forms" else f"--{name.replace('_', '-')}"
                owners = " and ".join(suites)
                raise ConfigError(f"{flag} belongs to --suite {owners}, the suite is {self.suite}; leave it out")
        if self.suite == "ruler":
            for task in self.tasks:
                if task not in TASKS:
                    raise ConfigError(f"task {task!r} is unknown; --tasks takes some of {', '.join(TASKS)}")
        super().__post_init__()

    @property
    def chosen_tasks(self) -> tuple[str, ...]:
        """The tasks named, or all of ours."""
        return super().chosen_tasks if self.suite == "ruler" else tuple(self.tasks or HARNESS_TASKS)

    @property
    def chosen_lengths(self) -> tuple[int, ...]:
        """The lengths given, or those of the suite; of the book all of it, and parts that a full cache can hold."""
        return super().chosen_lengths if self.suite == "ruler" else tuple(self.lengths or (128, 4096, 0))

    @property
    def configs(self) -> list[CacheConfig]:
        """Every policy and window; contexts of the harness are one chunk unless --chunk is given."""
        whole = {"chunk": self.cache.get("chunk") or 0} if self.suite == "harness" else {}
        return configs_of(self.policies, self.windows or (DEFAULT_WINDOW,), self.seeds, {**self.cache, **whole})

    def check(self) -> None:
        """Also check that the harness is installed."""
        super().check()
        if self.suite == "harness":
            require_harness()

    def make(self) -> Any:
        """The comparison of the suite."""
        return resolve(_SUITES[self.suite])(self)
