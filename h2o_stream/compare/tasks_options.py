"""The options of ``h2o-compare tasks``: two suites of tasks, the lm-evaluation-harness's and those after RULER."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from h2o_stream.compare.options import ComparisonOptions, Policies, configs_of
from h2o_stream.compare.ruler.items import SINGLE, TASKS
from h2o_stream.config import DEFAULT_WINDOW, CacheConfig
from h2o_stream.errors import ConfigError
from h2o_stream.options import Option, listed, listed_if_any, numbers, numbers_if_any
from h2o_stream.registry import resolve

HARNESS_TASKS = ("h2o_facts", "h2o_topics", "h2o_causes")
"""Small tasks of our own in the harness's format."""

Form = Literal["one-turn", "multi-turn"]
"""Whether a question comes with its context, or one after another in a conversation."""


def _forms(text: str, flag: str) -> tuple[str, ...]:
    forms = tuple(dict.fromkeys(listed(text, flag)))
    for form in forms:
        if form not in get_args(Form):
            raise ConfigError(f"form {form!r} is unknown; {flag} takes some of {', '.join(get_args(Form))}")
    return forms


_FLAGS = {
    "harness": {"ratio": "--ratio", "task_folder": "--task-folder", "shots": "--shots", "limit": "--limit"},
    "ruler": {
        "forms": "--form",
        "lengths": "--lengths",
        "depths": "--depths",
        "items": "--items",
        "haystack": "--haystack",
        "text": "--text",
        "seed": "--seed",
    },
}
"""Fields that only one suite has, with their options."""


@dataclass(frozen=True, kw_only=True)
class TasksOptions(ComparisonOptions):
    """Accuracy on tasks: the lm-evaluation-harness's (extra "eval"), or with --suite ruler those of RULER.

    harness: a context is read whole and then evicted; answers are scored under eviction. h2o_facts, h2o_topics and
    h2o_causes are small tasks of our own. The harness's tasks need their data on this machine, or the network.

    ruler: needles, chains of variables and word counts in contexts of any length, made from code and a text. They are
    read and answered under eviction, in one turn or in a conversation that goes on. Needs no extra.
    """

    comparison = "h2o_stream.compare.tasks:Tasks"
    page = "h2o_stream.ui.pages.tasks:page"

    suite: Annotated[Literal["harness", "ruler"], Option("Which tasks there are.")] = "harness"
    tasks: Annotated[
        Sequence[str], Option("Names of tasks, separated by commas. (default: ours, all)", parse=listed_if_any)
    ] = ()
    policies: Policies = ("full", "recent", "h2o")
    ratio: Annotated[float | None, Option("harness: window, as a fraction of each context.", min=0, max=1)] = 0.2
    windows: Annotated[
        Sequence[int], Option("Windows in tokens, separated by commas; replaces --ratio.", parse=numbers_if_any)
    ] = ()
    task_folder: Annotated[Path | None, Option("harness: folder with more tasks, in its format.")] = None
    shots: Annotated[int | None, Option("harness: examples before each question. (default: the task's)", min=0)] = None
    limit: Annotated[int | None, Option("harness: documents; default is all.", min=1)] = None
    forms: Annotated[Sequence[Form], Option("ruler: one-turn, multi-turn, or both.", "--form", parse=_forms)] = (
        get_args(Form)
    )
    lengths: Annotated[Sequence[int], Option("ruler: tokens of a context, separated by commas.", parse=numbers)] = (
        1024,
        4096,
    )
    depths: Annotated[
        Sequence[int],
        Option(
            "ruler: depths of the needle in %, for a heatmap of niah_single by length and depth.", parse=numbers_if_any
        ),
    ] = ()
    items: Annotated[int, Option("ruler: contexts for each task, form and length.", min=2)] = 8
    haystack: Annotated[
        Literal["text", "noise"], Option("ruler: what needles are hidden in: a text, or a few repeated sentences.")
    ] = "text"
    text: Annotated[Path | None, Option("ruler: a text file. (default: the manual of Python)")] = None
    seed: Annotated[int, Option("ruler: seed of the contexts.", min=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        defaults = {field.name: field.default for field in fields(self)}
        for suite, flags in _FLAGS.items():
            for name, flag in flags.items():
                if suite != self.suite and getattr(self, name) != defaults[name]:
                    raise ConfigError(f"{flag} belongs to --suite {suite}, the suite is {self.suite}; leave it out")
        if self.suite == "ruler":
            for task in self.tasks:
                if task not in TASKS:
                    raise ConfigError(f"task {task!r} is unknown; --tasks takes some of {', '.join(TASKS)}")
        for depth in self.depths:
            if depth > 100:
                raise ConfigError(f"a depth of {depth}% is outside the context; --depths takes 0 to 100")
        if self.depths and (set(self.tasks) - {SINGLE} or self.forms not in (get_args(Form), ("one-turn",))):
            raise ConfigError(f"--depths goes with {SINGLE} in one turn only; leave out --tasks and --form")

    @property
    def chosen_tasks(self) -> tuple[str, ...]:
        """The tasks named, or all of ours; with depths the one that has them."""
        if self.depths:
            return (SINGLE,)
        return tuple(self.tasks) or (HARNESS_TASKS if self.suite == "harness" else tuple(TASKS))

    @property
    def chosen_forms(self) -> tuple[Form, ...]:
        """The forms; with depths the one that has them."""
        return ("one-turn",) if self.depths else tuple(self.forms)

    @property
    def configs(self) -> list[CacheConfig]:
        """Every policy and window; contexts of the harness are one chunk unless --chunk is given."""
        whole = {"chunk": self.cache.get("chunk") or 0} if self.suite == "harness" else {}
        return configs_of(self.policies, self.windows or (DEFAULT_WINDOW,), self.seeds, {**self.cache, **whole})

    def make(self) -> Any:
        """The comparison of the suite."""
        return resolve(self.comparison if self.suite == "harness" else "h2o_stream.compare.ruler.suite:Ruler")(self)
