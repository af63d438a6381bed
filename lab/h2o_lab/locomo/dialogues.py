"""LoCoMo (Maharana et al. 2024, arXiv 2402.17753): questions about months of dialogue between two people."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from h2o_stream.base.json_text import parse_json
from h2o_stream.base.texts import read_text
from h2o_stream.errors import DataError

CATEGORIES = {4: "single fact", 1: "several facts", 2: "date", 3: "inference", 5: "unanswerable"}
"""The benchmark's numbers of kinds of questions."""

UNANSWERABLE = 5
_SEVERAL, _INFERENCE = 1, 3

_ABSTAINS = ("no information available", "not mentioned")
"""A reply to an unanswerable question is right if it has one of these."""

_TURN = re.compile(r"D0*+(\d+):0*+(\d+)")
"""A turn's name in the file, by the numbers of the session and of the turn."""

Stem = Callable[[str], str]


@dataclass(frozen=True)
class Question:
    """A question about a dialogue.

    Attributes:
        evidence: numbers of the turns that answer it, from 1.
    """

    text: str
    answer: str
    category: int
    evidence: frozenset[int]


@dataclass(frozen=True)
class Dialogue:
    """A dialogue: its name, its turns with their day and speaker, and questions about it."""

    name: str
    turns: tuple[str, ...]
    questions: tuple[Question, ...]


def read_dialogues(file: Path) -> list[Dialogue]:
    """The dialogues of the benchmark's file, ``locomo10.json``; raises DataError if it is another one."""
    text = read_text(file, f"--dialogues {file}")
    try:
        return [_dialogue(record) for record in parse_json(text)]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"--dialogues {file} is not the file of LoCoMo, locomo10.json: {error!r}") from error


def _dialogue(record: dict[str, Any]) -> Dialogue:
    said, numbers, turns = record["conversation"], dict[tuple[str, str], int](), list[str]()
    sessions = sorted(int(name[8:]) for name in said if re.fullmatch(r"session_\d+", name))
    for session in sessions:
        day = said[f"session_{session}_date_time"].rpartition(" on ")[2].replace(",", "")
        for turn in said[f"session_{session}"]:
            shared = f" (shares {turn['blip_caption']})" if turn.get("blip_caption") else ""
            turns.append(f"{turn['speaker']}, {day}: {turn['text'].strip()}{shared}")
            numbers[_TURN.findall(turn["dia_id"])[0]] = len(turns)
    questions = []
    for asked in record["qa"]:
        places = _TURN.findall(" ".join(asked.get("evidence", ())))
        evidence = frozenset(numbers[place] for place in places if place in numbers)
        if asked["category"] not in CATEGORIES:
            raise ValueError(f"a question of category {asked['category']}")
        questions.append(Question(str(asked["question"]), str(asked.get("answer", "")), asked["category"], evidence))
    return Dialogue(str(record["sample_id"]), tuple(turns), tuple(questions))


def score(reply: str, question: Question, stem: Stem) -> float:
    """How right a reply is, 0 to 1, as the benchmark's own script says: the F1 of its words, without endings; of each
    of several facts, separated by commas, that of the best part of the reply. Where nothing answers, whether it says
    so.
    """
    if question.category == UNANSWERABLE:
        return float(any(phrase in reply.lower() for phrase in _ABSTAINS))
    answer = question.answer.split(";")[0].strip() if question.category == _INFERENCE else question.answer
    if question.category != _SEVERAL:
        return _f1(reply, answer, stem)
    replies = reply.split(",")
    return fmean(max(_f1(part, fact, stem) for part in replies) for fact in answer.split(","))


def _f1(reply: str, answer: str, stem: Stem) -> float:
    said, right = _words(reply, stem), _words(answer, stem)
    common = sum((Counter(said) & Counter(right)).values())
    return 2 * common / (len(said) + len(right)) if common else 0.0


def _words(text: str, stem: Stem) -> Sequence[str]:
    plain = "".join(letter for letter in text if letter not in string.punctuation).lower()
    return [stem(word) for word in re.sub(r"\b(a|an|the|and)\b", " ", plain).split()]
