"""What recall finds for LoCoMo's questions at the end of a dialogue, and what the model replies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from h2o_lab.locomo.dialogues import CATEGORIES, UNANSWERABLE, Dialogue, Question, read_dialogues, score
from h2o_lab.locomo.options import LocomoOptions
from h2o_lab.phrases import RECALL_NAMES
from h2o_lab.recall.asking import GREEDY, say, tell
from h2o_stream.compare.comparison import Comparison, Job, JobProgress, Notify, label_of, window_of
from h2o_stream.compare.folder import JobResult
from h2o_stream.config import CacheConfig, RecallMode
from h2o_stream.errors import ConfigError
from h2o_stream.recall.decision import decide
from h2o_stream.recall.index import PassageIndex
from h2o_stream.recall.passage import Candidate, Passage
from h2o_stream.recall.passages import split
from h2o_stream.recall.terms import TermWeights
from h2o_stream.session.conversation import Conversation
from h2o_stream.session.jsonl import jsonl_text

_LISTED = 5
"""Passages among which the right turn has to be."""

_SYSTEM = (
    "Answer questions about the conversation in a few words, with words from it. "
    'If it does not say the answer, reply "Not mentioned".'
)
"""About as the benchmark asks its models."""

_MEANS = ("listed", "read", "reading", "f1")


class Locomo(Comparison[LocomoOptions]):
    """Every policy and mode of recall in the same dialogues, each of whose turns is a message that gets no reply."""

    name = "locomo"
    native = True

    def __init__(self, options: LocomoOptions) -> None:
        super().__init__(options)
        dialogues = read_dialogues(options.dialogues)
        numbers = options.conversations or range(1, len(dialogues) + 1)
        if not set(numbers) <= set(range(1, len(dialogues) + 1)):
            raise ConfigError(
                f"conversations is {','.join(map(str, numbers))}; {options.dialogues} has {len(dialogues)}"
            )
        self._dialogues = [dialogues[number - 1] for number in numbers]
        self._answers: dict[str, list[dict[str, Any]]] = {}

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Load the model."""
        return {
            **self.load_model(notify),
            "file": str(self.options.dialogues),
            "dialogues": [dialogue.name for dialogue in self._dialogues],
            "recall": list(self.options.recall),
            "answers": self.options.answers,
        }

    @property
    def _runs(self) -> list[tuple[CacheConfig, RecallMode]]:
        return [(config, mode) for config in self.configs for mode in self.options.recall]

    def jobs(self) -> list[Job]:
        """One for each policy, mode of recall and dialogue."""
        return [self._job(*run, dialogue) for run in self._runs for dialogue in self._dialogues]

    def _job(self, config: CacheConfig, mode: RecallMode, dialogue: Dialogue) -> Job:
        label = " ".join(filter(None, (label_of(config), RECALL_NAMES[mode], dialogue.name)))
        key = self.key(config, recall=mode, locomo=repr(dialogue), system=_SYSTEM, answers=self.options.answers)
        measure = self._measure if self.options.answers else self._search
        return Job(
            label, key, len(dialogue.turns) + len(dialogue.questions), partial(measure, config, mode, dialogue), config
        )

    def _measure(
        self, config: CacheConfig, mode: RecallMode, dialogue: Dialogue, kept: JobResult | None = None
    ) -> Iterator[JobProgress | JobResult]:
        from nltk.stem import PorterStemmer

        stem, answers = PorterStemmer().stem, list[dict[str, Any]](kept.figures["answers"] if kept else ())
        with self.engine_for(config, GREEDY) as engine:
            conversation = Conversation(engine, _SYSTEM, recall=mode)
            for number, turn in enumerate(dialogue.turns, 1):
                tell(conversation, turn, "")
                yield JobProgress(number)
            state = conversation.state_dict()
            for question in dialogue.questions[len(answers) :]:
                reply, _ = say(conversation, question.text)
                found = _found(question, conversation.recall.last)
                answers.append({**found, "reply": reply, "f1": score(reply, question, stem)})
                conversation.load_state_dict(state)
                done = len(dialogue.turns) + len(answers)
                yield JobProgress(done, f"{len(answers)} asked", lambda: JobResult({"answers": answers}))
        yield JobResult({"answers": answers})

    def _search(self, config: CacheConfig, mode: RecallMode, dialogue: Dialogue) -> Iterator[JobProgress | JobResult]:
        """The same without replies: nothing is fed, so that the cache holds nothing."""
        with self.engine_for(config, GREEDY) as engine:
            terms, budget = TermWeights(self.tokenizer, engine.served.read_embeddings), engine.cache.plan.window // 4
        index, answers = PassageIndex(), list[dict[str, Any]]()
        for number, turn in enumerate(dialogue.turns, 1):
            index.add(
                number,
                turn,
                "",
                [Passage(number, "user", turn[part.start : part.stop], number, number + 1) for part in split(turn)],
            )
        for question in dialogue.questions:
            found = decide(question.text, index, terms, lambda *_: 0.0, budget, 2 * budget, self._count, lambda _: None)
            answers.append({**_found(question, found), "reply": "", "f1": None})
        index.close()
        yield JobResult({"answers": answers})

    def _count(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def records(self, results: Iterable[JobResult]) -> Iterator[dict[str, Any]]:
        """One for each policy, mode of recall and category, and one for all questions that can be answered.

        ``listed``: the right turn is among the first five candidates; ``read``: it is read again, or still held;
        ``reading``: anything is read again. Shares of the questions; ``f1``: see `score`.
        """
        remaining = iter(results)
        for config, mode in self._runs:
            answers = [answer for _ in self._dialogues for answer in next(remaining).figures["answers"]]
            self._answers[f"{config.policy}-{mode}"] = answers
            about = {"policy": config.policy, "window": window_of(config), "recall": mode}
            kinds = {name: {name} for name in CATEGORIES.values()}
            for name, kind in {**kinds, "answerable": set(kinds) - {CATEGORIES[UNANSWERABLE]}}.items():
                asked = [answer for answer in answers if answer["category"] in kind]
                if not asked:
                    continue
                means = {mean: _mean([answer[mean] for answer in asked]) for mean in _MEANS}
                yield {"type": self.name, **about, "category": name, "questions": len(asked), **means}

    def files(self) -> Iterator[tuple[str, str]]:
        """All replies."""
        for label, answers in self._answers.items():
            yield f"replies/{label}.jsonl", jsonl_text(answers)


def _found(question: Question, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """What was found for a question; whether it is right is None if the benchmark names no turn that answers."""
    read = [one for one in candidates if one.verdict in ("recalled", "still held")]
    listed, right = (
        any(one.passage.turn in question.evidence for one in some)
        if question.evidence and question.category != UNANSWERABLE
        else None
        for some in (candidates[:_LISTED], read)
    )
    return {
        "category": CATEGORIES[question.category],
        "question": question.text,
        "answer": question.answer,
        "listed": listed,
        "read": right,
        "reading": any(one.verdict == "recalled" for one in candidates),
        "turns": [one.passage.turn for one in read],
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
