"""Whether facts told in a chat are still told after other talk, asked as a user asks; with and without recall."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any

from h2o_lab.phrases import RECALL_NAMES
from h2o_lab.recall.asking import GREEDY
from h2o_lab.recall.fact_chat import FactChat
from h2o_lab.recall.fact_stream import SPACING, FactStream, Filler, facts_told_once, facts_with_updates
from h2o_lab.recall.facts import KINDS, Fact, read_facts
from h2o_lab.recall.options import RecallOptions
from h2o_stream.compare.comparison import Comparison, Job, JobProgress, Notify, label_of, window_of
from h2o_stream.compare.folder import JobResult
from h2o_stream.compare.models import context_of
from h2o_stream.compare.nll import digest_of, read_tokens
from h2o_stream.config import CacheConfig, RecallMode
from h2o_stream.errors import DataError
from h2o_stream.session.conversation import Conversation
from h2o_stream.session.jsonl import jsonl_text
from h2o_stream.session.questions import load_questions

_MAX_TOKENS = 1 << 17
"""Tokens of a text that are used before it is repeated."""


@dataclass(frozen=True)
class _Run:
    """What a job measures: a policy with recall on or off, at distances or in a chat."""

    config: CacheConfig
    recall: RecallMode
    chat: bool

    @property
    def label(self) -> str:
        """For people."""
        return " ".join(filter(None, (label_of(self.config), RECALL_NAMES[self.recall], "chat" if self.chat else "")))


class Recall(Comparison[RecallOptions]):
    """Every policy in the same chats: facts asked for at set distances, and at the end of talk about other things."""

    name = "recall"
    native = True

    _facts: tuple[Fact, ...]

    def __init__(self, options: RecallOptions) -> None:
        super().__init__(options)
        self._tokens: list[int] = []
        self._replies: dict[str, list[Mapping[str, Any]]] = {}

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Load the facts, the model and the text."""
        self._facts = read_facts(self.options.facts)
        settings = self.load_model(notify)
        self._tokens = read_tokens(self.options.text, self.tokenizer, _MAX_TOKENS)
        if not self.tokenizer.decode(self._tokens, skip_special_tokens=True).strip():
            raise DataError(f"--text {self.options.text}: there are no words in it")
        return {
            **settings,
            "text": str(self.options.text),
            "tokens": len(self._tokens),
            "digest": digest_of(self._tokens),
            "facts": self.options.facts,
            "distances": list(self.options.distances),
            "recall": list(self.options.recall),
            "chat": self.options.chat,
            "context": context_of(self.model),
        }

    @property
    def _runs(self) -> list[_Run]:
        """All jobs. A full cache has nothing to recall, and is not asked in the chat, which may exceed its context."""
        modes = {config: self.options.recall if config.policy != "full" else ("off",) for config in self.configs}
        streams = [_Run(config, mode, False) for config in self.configs for mode in modes[config]]
        chats = [_Run(run.config, run.recall, True) for run in streams if run.config.policy != "full"]
        return [*(streams if self.options.distances else ()), *(chats if self.options.chat else ())]

    def jobs(self) -> list[Job]:
        """One for each policy and mode of recall; with --chat another one."""
        return [self._job(run) for run in self._runs]

    def _job(self, run: _Run) -> Job:
        settings = {"recall": run.recall, "facts": [asdict(fact) for fact in self._facts]}
        if run.chat:
            assert self.options.chat
            source = load_questions(None).source
            key = self.key(run.config, **settings, chat=self.options.chat, source=source)
            return Job(run.label, key, self.options.chat, partial(self._measure_chat, run), run.config)
        distances = list(self.options.distances)
        key = self.key(run.config, **settings, text=digest_of(self._tokens), distances=distances)
        total = 2 * (SPACING * len(self._facts) + max(distances))
        return Job(run.label, key, total, partial(self._measure_stream, run), run.config)

    def _measure_stream(self, run: _Run, kept: JobResult | None = None) -> Iterator[JobProgress | JobResult]:
        answers, before = list[dict[str, Any]](), 0
        known = deque[dict[str, Any]](kept.figures["answers"] if kept else ())
        limit = context_of(self.model) if run.config.policy == "full" else None
        for tellings in (facts_told_once(self._facts), facts_with_updates(self._facts)):
            filler, seen = Filler(self.tokenizer, self._tokens), 0
            with self.engine_for(run.config, GREEDY) as engine:
                conversation = Conversation(engine, recall=run.recall)
                for event in FactStream(conversation, tellings, self.options.distances, filler, limit, known).run():
                    if isinstance(event, int):
                        seen = event
                    else:
                        answers.append({"distance": event[0], **asdict(event[1])})
                    yield JobProgress(before + seen, f"{len(answers)} asked", lambda: JobResult({"answers": answers}))
            before += seen
        yield JobResult({"answers": answers})

    def _measure_chat(self, run: _Run) -> Iterator[JobProgress | JobResult]:
        assert self.options.chat
        with self.engine_for(run.config, GREEDY) as engine:
            conversation, prompts = Conversation(engine, recall=run.recall), load_questions(None).prompts(loop=True)
            chat = FactChat(conversation, self._facts, prompts, self.options.chat)
            for seen in chat.talk():
                yield JobProgress(min(seen, self.options.chat))
            answers = list[dict[str, Any]]()
            for answer in chat.ask():
                answers.append(asdict(answer))
                yield JobProgress(self.options.chat, f"{len(answers)} asked")
        yield JobResult({"answers": answers, "turns": [asdict(turn) for turn in chat.turns]})

    def records(self, results: Iterable[JobResult]) -> Iterator[dict[str, Any]]:
        """One for each policy, mode of recall, kind of question, and distance or chat."""
        for run, result in zip(self._runs, results, strict=True):
            answers = result.figures["answers"]
            self._replies[run.label.replace(" ", "-")] = answers
            about = {
                "policy": run.config.policy,
                "window": window_of(run.config),
                "seed": run.config.seed,
                "recall": run.recall,
                "facts": len(self._facts),
            }
            if run.chat:
                rates = chat_rates(answers, result.figures["turns"])
            else:
                rates = rates_by_distance(answers, self.options.distances)
                about["text"] = str(self.options.text)
            yield from ({"type": "recall-chat" if run.chat else self.name, **about, **rate} for rate in rates)

    def files(self) -> Iterator[tuple[str, str]]:
        """All replies."""
        for label, answers in self._replies.items():
            yield f"replies/{label}.jsonl", jsonl_text(answers)


_Answer = Mapping[str, Any]
"""The fields of an `Answer`, and its ``distance``."""


def rates_by_distance(answers: Sequence[_Answer], distances: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The rates of each kind at each distance that was asked at.

    Besides those of `_rates`: ``distance``; ``tokens``, the mean of the true distances; ``relative``, the right replies
    as a share of those at the shortest distance to the same questions, None if there were none.
    """
    shortest = min(distances, default=0)
    for kind in KINDS:
        near = _select(answers, kind, shortest)
        for distance in dict.fromkeys(distances):
            asked = _select(answers, kind, distance)
            if asked:
                rates = _rates(asked, _select(answers, "same", distance))
                yield {"kind": kind, "distance": distance, **rates, "relative": _ratio(asked, near)}


def chat_rates(answers: Sequence[_Answer], turns: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rates of each kind at the end of a chat.

    Besides those of `_rates`: ``turns``, the turns of talk about other things; ``turns_recalling``, the share of them
    before which passages were read again; ``first_turns_recalling``, the same of first turns, which refer to nothing.
    """
    of_turns = {
        "turns": len(turns),
        "turns_recalling": _share(turns, "recalling"),
        "first_turns_recalling": _share([turn for turn in turns if turn["first"]], "recalling"),
    }
    for kind in KINDS:
        if asked := [answer for answer in answers if answer["kind"] == kind]:
            yield {
                "kind": kind,
                **_rates(asked, [answer for answer in answers if answer["kind"] == "same"]),
                **of_turns,
            }


def _rates(asked: Sequence[_Answer], same: Sequence[_Answer]) -> dict[str, Any]:
    """What replies to questions of one kind have in common.

    Returns:
        ``tokens``: mean of `Answer.tokens`. ``questions``: their number. ``accuracy``, ``wrong`` and ``recalling``:
        shares of `Answer.right`, `wrong` and `recalling`. ``margin``: its mean in nats, None if nothing has one.
        ``recalled``: share of margins above 0. ``of_same``: right replies as a share of those to the same facts asked
        for in the same words, None if there were none.
    """
    margins = [answer["margin"] for answer in asked if answer["margin"] is not None]
    return {
        "tokens": round(fmean(answer["tokens"] for answer in asked), 1),
        "questions": len(asked),
        "accuracy": _share(asked, "right"),
        "wrong": _share(asked, "wrong"),
        "margin": fmean(margins) if margins else None,
        "recalled": fmean(margin > 0 for margin in margins) if margins else None,
        "recalling": _share(asked, "recalling"),
        "of_same": _ratio(asked, same),
    }


def _select(answers: Sequence[_Answer], kind: str, distance: int | None = None) -> list[_Answer]:
    return [answer for answer in answers if answer["kind"] == kind and answer.get("distance") == distance]


def _share(items: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return fmean(item[name] for item in items) if items else None


def _ratio(asked: Sequence[_Answer], reference: Sequence[_Answer]) -> float | None:
    """Right replies as a share of those in the reference, of what is in both."""
    common = {answer["id"] for answer in asked} & {answer["id"] for answer in reference}
    right, right_in_reference = (
        sum(answer["right"] for answer in answers if answer["id"] in common) for answers in (asked, reference)
    )
    return right / right_in_reference if right_in_reference else None
