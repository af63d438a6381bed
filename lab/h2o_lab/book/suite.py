"""Questions about a book under each policy: ``h2o-compare tasks --suite book``."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy

from h2o_lab.book.questions import BookQuestion, Part, parts_of, read_questions
from h2o_lab.harness.options import TasksOptions
from h2o_lab.recall.asking import GREEDY, prefilled, read, say, widest
from h2o_stream.base.resources import python_manual
from h2o_stream.compare.comparison import Comparison, Job, JobProgress, Notify, label_of, window_of
from h2o_stream.compare.folder import JobResult
from h2o_stream.compare.models import context_of, dtype_of
from h2o_stream.compare.nll import ratio_interval
from h2o_stream.config import CacheConfig, RecallMode
from h2o_stream.engine.text import shared_length
from h2o_stream.errors import ConfigError, DataError
from h2o_stream.session.conversation import Conversation
from h2o_stream.session.jsonl import jsonl_text

_SUITE = "book"

_INTRODUCTION = "This is from the manual of Python. Read it, I will ask about it later."
_READ = "I have read it."

_ROOM = 256
"""Tokens that a full cache needs besides a part: the opening, the question and the reply."""


@dataclass(frozen=True)
class _Run:
    """A job: a policy, and parts of at most so many tokens; 0 for the whole book, None for nothing."""

    config: CacheConfig
    length: int | None

    @property
    def label(self) -> str:
        """For people."""
        if self.length is None:
            return "no book"
        return f"{'whole book' if self.length == 0 else f'{self.length} tokens'} {label_of(self.config)}"


class Book(Comparison[TasksOptions]):
    """Every policy reads the parts of a book that answer questions, and is asked; and nothing is read at all."""

    name = "tasks"
    native = True

    _digest: str
    _questions: tuple[BookQuestion, ...]
    _parts: dict[int, list[Part]]
    _tokens: dict[int, list[int]]
    """Tokens of each part."""
    _beyond: frozenset[int] = frozenset()
    """Lengths that are too long for a full cache."""

    def __init__(self, options: TasksOptions) -> None:
        super().__init__(options)
        self._replies: dict[str, list[Mapping[str, Any]]] = {}

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Load the model, and cut the book into parts."""
        book, questions = python_manual(), read_questions()
        self._digest = hashlib.sha256(book.encode()).hexdigest()[:20]
        self._questions = tuple(question for question in questions if question.end(book) is not None)
        if missing := [question.id for question in questions if question not in self._questions]:
            notify(f"not asked, as this Python's manual lacks their passages: {', '.join(missing)}")
        if not self._questions:
            raise DataError("this Python's manual has none of the passages that are asked for")
        settings, lengths = self.load_model(notify), self.options.chosen_lengths
        self._parts = {length: list(parts_of(book, self._questions, length, self._count)) for length in lengths}
        self._tokens = {length: [self._count(part.text) for part in parts] for length, parts in self._parts.items()}
        self._limit_full_cache(notify)
        return {
            **settings,
            "suite": _SUITE,
            "dtype": dtype_of(self.model),
            "lengths": list(lengths),
            "recall": list(self.options.recall),
            "questions": [question.id for question in self._questions],
            "digest": self._digest,
        }

    def _count(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _limit_full_cache(self, notify: Notify) -> None:
        """Leave the full cache out where parts with their questions are longer than the model's context."""
        context, every = context_of(self.model), self._runs
        beyond = [n for n, tokens in self._tokens.items() if context is not None and max(tokens) + _ROOM > context]
        self._beyond = frozenset(beyond)
        if left_out := [run.label for run in every if run not in self._runs]:
            notify(f"left out, as the model has {context} positions: {', '.join(left_out)}")
        if not any(run.length is not None for run in self._runs):
            raise ConfigError(f"policy full has no more than the model's {context} positions; lower --lengths")

    @property
    def _runs(self) -> list[_Run]:
        """All jobs; the first one is asked without the book."""
        return [
            _Run(CacheConfig("full"), None),
            *(
                _Run(config, length)
                for length in self._parts
                for config in self.configs
                if config.policy != "full" or length not in self._beyond
            ),
        ]

    def _modes(self, run: _Run) -> Sequence[RecallMode]:
        """The modes of recall. A full cache has nothing to recall."""
        return ("off",) if run.config.policy == "full" else self.options.recall

    def jobs(self) -> list[Job]:
        """One for each length and policy, and before them one without the book."""
        return [self._job(run) for run in self._runs]

    def _job(self, run: _Run) -> Job:
        settings = {
            "suite": _SUITE,
            "length": run.length,
            "recall": list(self._modes(run)),
            "questions": [asdict(question) for question in self._questions],
            "digest": self._digest,
        }
        measure = self._ask_without_book if run.length is None else partial(self._measure, run)
        total = len(self._questions) if run.length is None else sum(self._tokens[run.length])
        return Job(run.label, self.key(run.config, **settings), total, measure, run.config)

    def _ask_without_book(self) -> Iterator[JobProgress | JobResult]:
        answers = list[dict[str, Any]]()
        with self.engine_for(CacheConfig("full"), GREEDY) as engine:
            conversation = Conversation(engine)
            for question in self._questions:
                answers.append(_answer(conversation, question, partial(conversation.restart, conversation.system)))
                yield JobProgress(len(answers))
        yield JobResult({"answers": answers})

    def _measure(self, run: _Run, kept: JobResult | None = None) -> Iterator[JobProgress | JobResult]:
        assert run.length is not None
        answers, before = list[dict[str, Any]](), 0
        known = deque[dict[str, Any]](kept.figures["answers"] if kept else ())
        with self.engine_for(run.config, GREEDY) as engine:
            conversation = Conversation(engine)
            for part, tokens in zip(self._parts[run.length], self._tokens[run.length], strict=True):
                if len(known) >= (asked := len(part.questions) * len(self._modes(run))):
                    answers.extend(known.popleft() for _ in range(asked))
                    before += tokens
                    continue
                conversation.restart(conversation.system)
                conversation.recall.mode = widest(self._modes(run))
                for done in read(conversation, f"{_INTRODUCTION}\n\n{part.text}", _READ):
                    yield JobProgress(before + min(done, tokens), f"{len(answers)} asked")
                before += tokens
                state = conversation.state_dict()
                for mode in self._modes(run):
                    conversation.recall.mode = mode
                    for question in part.questions:
                        if known:
                            answers.append(known.popleft())
                            continue
                        answer = _answer(conversation, question, partial(conversation.load_state_dict, state))
                        answers.append(answer | {"distance": self._distance(part, question)})
                        yield JobProgress(before, f"{len(answers)} asked", lambda: JobResult({"answers": answers}))
        yield JobResult({"answers": answers})

    def _distance(self, part: Part, question: BookQuestion) -> int:
        """Tokens from a passage to the end of the part."""
        return self._count(part.text[question.end(part.text) :])

    def records(self, results: Iterable[JobResult]) -> Iterator[dict[str, Any]]:
        """One for each length, policy and mode of recall."""
        runs, remaining = iter(self._runs), iter(results)
        next(runs)
        nothing = next(remaining).figures["answers"]
        self._replies["no-book"] = nothing
        for run, result in zip(runs, remaining, strict=True):
            answers = result.figures["answers"]
            self._replies[run.label.replace(" ", "-")] = answers
            for mode in self._modes(run):
                yield {
                    "type": self.name,
                    "suite": _SUITE,
                    "length": run.length,
                    "policy": run.config.policy,
                    "window": window_of(run.config),
                    "seed": run.config.seed,
                    "recall": mode,
                    **_rates([answer for answer in answers if answer["recall"] == mode], nothing),
                    "nothing": _rates(nothing, nothing),
                }

    def files(self) -> Iterator[tuple[str, str]]:
        """All replies."""
        for label, answers in self._replies.items():
            yield f"replies/{label}.jsonl", jsonl_text(answers)


def _answer(conversation: Conversation, question: BookQuestion, take_back: Callable[[], None]) -> dict[str, Any]:
    """The reply to a question, and what it is worth. The conversation is then as before."""
    likelihood = _log_probability(conversation, question)
    take_back()
    reply, recalling = say(conversation, question.question)
    take_back()
    return {
        "id": question.id,
        "reply": reply,
        "right": question.right(reply),
        "f1": question.f1(reply),
        "log_probability": likelihood,
        "recall": conversation.recall.mode,
        "recalling": recalling,
    }


def _log_probability(conversation: Conversation, question: BookQuestion) -> float:
    """That of the answer in nats, after the beginning of the reply. Leaves both in the stream."""
    engine = conversation.engine
    prefix, reply = (
        list(engine.tokenizer(text, add_special_tokens=False)["input_ids"])
        for text in (question.reply, f"{question.reply} {question.answers[0]}")
    )
    with prefilled(conversation, question.question):
        losses = engine.served.losses(reply[:-1], reply[1:])
    return -float(losses[shared_length(prefix, reply) - 1 :].sum())


def _rates(answers: Sequence[Mapping[str, Any]], nothing: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What replies to the questions have in common.

    Returns:
        ``questions``: their number. ``accuracy``: the share of right replies. ``f1``: the mean. ``gain``: the mean of
        what the answers' log-probabilities gain over those of `nothing`, and ``gain_interval`` its 95% interval.
        ``recalling``: the share of questions before which something was read again.
    """
    before = {answer["id"]: answer["log_probability"] for answer in nothing}
    gains = numpy.array([a["log_probability"] - before[a["id"]] for a in answers])
    gain = ratio_interval(gains, numpy.ones_like(gains))
    return {
        "questions": len(answers),
        "accuracy": fmean(answer["right"] for answer in answers),
        "f1": fmean(answer["f1"] for answer in answers),
        "gain": gain.mean,
        "gain_interval": [gain.low, gain.high],
        "recalling": fmean(answer["recalling"] for answer in answers),
    }
