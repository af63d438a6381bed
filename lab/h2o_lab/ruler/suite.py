"""RULER's tasks under each policy: ``h2o-compare tasks --suite ruler``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

from h2o_lab.recall.asking import GREEDY
from h2o_lab.ruler.answers import Answer, ask_at_once, ask_in_turns, ask_without_context
from h2o_lab.ruler.items import Haystack, Item, make_item
from h2o_lab.ruler.options import Form, RulerOptions
from h2o_lab.ruler.rates import rates
from h2o_stream.base.resources import python_manual
from h2o_stream.base.texts import read_text
from h2o_stream.compare.comparison import Comparison, Job, JobProgress, Notify, label_of, window_of
from h2o_stream.compare.folder import JobResult
from h2o_stream.compare.models import context_of, dtype_of
from h2o_stream.config import CacheConfig, RecallMode
from h2o_stream.errors import ConfigError
from h2o_stream.session.conversation import Conversation
from h2o_stream.session.jsonl import jsonl_text

QUESTIONS: dict[Form, int] = {"one-turn": 1, "multi-turn": 4}
"""Questions about a context."""

_SUITE = "ruler"

_Ask = Callable[[Conversation, Item], Iterator[Answer]]


@dataclass(frozen=True)
class _Cell:
    """A task in a form and of a length, with the needle at a depth in percent if one is given."""

    task: str
    form: Form
    length: int
    depth: int | None = None

    def __str__(self) -> str:
        return f"{self.task} {self.form} {self.length}" + ("" if self.depth is None else f" {self.depth}%")

    @property
    def fields(self) -> dict[str, Any]:
        """What is set of it."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class Ruler(Comparison[RulerOptions]):
    """Every policy on the same contexts, and a cache that never saw them."""

    name = "tasks"
    native = True

    _haystack: Haystack
    _beyond: frozenset[int] = frozenset()
    """Lengths that are too long for a full cache."""

    def __init__(self, options: RulerOptions) -> None:
        super().__init__(options)
        self._items: dict[_Cell, list[Item]] = {}
        self._replies: dict[str, list[Mapping[str, Any]]] = {}

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Load the text and the model."""
        path = self.options.text
        text = python_manual() if path is None else read_text(path, f"--text {path}")
        self._haystack = Haystack.of(None if self.options.haystack == "noise" else text, text)
        settings = self.load_model(notify)
        self._limit_full_cache(notify)
        for cell in self._cells:
            self._make_item(cell, 0)  # so that a wrong length is reported before the first job
        return {
            **settings,
            "suite": _SUITE,
            "dtype": dtype_of(self.model),
            "tasks": list(self.options.chosen_tasks),
            **self._settings,
            "forms": list(self.options.chosen_forms),
            "lengths": list(self.options.chosen_lengths),
            "recall": list(self.options.recall),
            **({"depths": list(self.options.depths)} if self.options.depths else {}),
        }

    def _limit_full_cache(self, notify: Notify) -> None:
        """Leave the full cache out where contexts are longer than the model's."""
        context, lengths = context_of(self.model), self.options.chosen_lengths
        beyond = [] if context is None else [length for length in lengths if length >= context]
        if not beyond or all(config.policy != "full" for config in self.configs):
            return
        if self.options.depths or len(beyond) == len(lengths):
            raise ConfigError(
                f"length {max(beyond)} with its questions exceeds the {context} positions of the model, which limit a "
                "full cache; lower --lengths, or leave full out of --policies"
            )
        self._beyond = frozenset(beyond)
        notify(f"policy full is left out at {', '.join(map(str, beyond))} tokens: the model has {context} positions")

    @property
    def _settings(self) -> dict[str, Any]:
        """What the items depend on."""
        return {
            "items": self.options.items,
            "item_seed": self.options.seed,
            "haystack": self.options.haystack,
            "digest": hashlib.sha256(repr(self._haystack).encode()).hexdigest()[:20],
        }

    @property
    def _cells(self) -> list[_Cell]:
        return [
            _Cell(task, form, length, depth)
            for length, depth, form, task in product(
                self.options.chosen_lengths,
                self.options.depths or (None,),
                self.options.chosen_forms,
                self.options.chosen_tasks,
            )
        ]

    def _make_item(self, cell: _Cell, number: int) -> Item:
        """An item, which is made once."""
        items = self._items.setdefault(cell, [])
        while len(items) <= number:
            items.append(
                make_item(
                    cell.task,
                    QUESTIONS[cell.form],
                    cell.length,
                    self._haystack,
                    self._count,
                    self.options.seed,
                    len(items),
                    None if cell.depth is None else cell.depth / 100,
                )
            )
        return items[number]

    def _count(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def jobs(self) -> list[Job]:
        """One for each task, form, length and policy, and before them one without the context."""
        return [
            job
            for cell in self._cells
            for job in (
                self._job(cell, CacheConfig("full"), ask_without_context, context=False),
                *(self._asking(cell, config) for config in self._configs_for(cell)),
            )
        ]

    def _configs_for(self, cell: _Cell) -> list[CacheConfig]:
        """Those that can hold a context."""
        return [config for config in self.configs if config.policy != "full" or cell.length not in self._beyond]

    def _modes(self, cell: _Cell, config: CacheConfig) -> Sequence[RecallMode]:
        """The modes of recall. There is nothing to recall from a single message, or for a full cache."""
        return ("off",) if cell.form == "one-turn" or config.policy == "full" else self.options.recall

    def _asking(self, cell: _Cell, config: CacheConfig) -> Job:
        if cell.form == "one-turn":
            return self._job(cell, config, ask_at_once)
        modes = self._modes(cell, config)
        return self._job(cell, config, partial(ask_in_turns, modes=modes), recall=list(modes))

    def _job(self, cell: _Cell, config: CacheConfig, ask: _Ask, context: bool = True, **settings: Any) -> Job:
        settings |= {"suite": _SUITE, "cell": cell.fields, "context": context, **self._settings}
        label = label_of(config) if context else "no context"
        run = partial(self._measure, cell, config, ask)
        return Job(f"{cell} {label}", self.key(config, **settings), self.options.items, run)

    def _measure(
        self, cell: _Cell, config: CacheConfig, ask: _Ask, kept: JobResult | None = None
    ) -> Iterator[JobProgress | JobResult]:
        answers: list[dict[str, Any]] = kept.figures["answers"] if kept else []
        with self.engine_for(config, GREEDY, at_context="stop") as engine:
            conversation = Conversation(engine, recall="off")
            for number in range(answers[-1]["item"] + 1 if answers else 0, self.options.items):
                conversation.restart(conversation.system)
                item = self._make_item(cell, number)
                answers.extend({"item": number, **asdict(answer)} for answer in ask(conversation, item))
                yield JobProgress(number + 1, keep=lambda: JobResult({"answers": answers}))
        yield JobResult({"answers": answers})

    def records(self, results: Iterable[JobResult]) -> Iterator[dict[str, Any]]:
        """One for each task, form, length, policy and mode of recall."""
        remaining = iter(results)
        for cell in self._cells:
            nothing, full = next(remaining).figures["answers"], None
            for config in self._configs_for(cell):
                answers = next(remaining).figures["answers"]
                full = answers if config.policy == "full" else full
                self._replies[f"{cell} {label_of(config)}".replace(" ", "-")] = answers
                for mode in self._modes(cell, config):
                    asked = [answer for answer in answers if answer["recall"] == mode]
                    yield {
                        "type": self.name,
                        "suite": _SUITE,
                        **cell.fields,
                        "policy": config.policy,
                        "window": window_of(config),
                        "seed": config.seed,
                        "recall": mode,
                        "recalling": fmean(answer["recalling"] for answer in asked),
                        "items": self.options.items,
                        **rates(asked, nothing, full),
                    }

    def files(self) -> Iterator[tuple[str, str]]:
        """All replies."""
        for label, answers in self._replies.items():
            yield f"replies/{label}.jsonl", jsonl_text(answers)
