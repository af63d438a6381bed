"""Our questions about the manual of Python, and the parts of it that answer them. Pure; no torch."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from h2o_lab.recall.facts import tells
from h2o_stream.session.jsonl import read_objects

QUESTIONS = Path(__file__).with_name("questions.jsonl")

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True)
class BookQuestion:
    """A question about a book.

    Attributes:
        id: names it in the replies of a folder.
        question: the user's message, in other words than the book's.
        reply: the beginning of a reply, up to the answer.
        answers: the answer, and other ways to write it.
        passage: some words of the book next to the answer.
    """

    id: str
    question: str
    reply: str
    answers: tuple[str, ...]
    passage: str

    def end(self, text: str) -> int | None:
        """Where the passage ends in a text, wherever its lines break; None if it is not there."""
        found = re.search(r"\s+".join(map(re.escape, self.passage.split())), text)
        return found.end() if found else None

    def right(self, reply: str) -> bool:
        """Whether a reply has the answer, as whole words."""
        return tells(reply, self.answers)

    def f1(self, reply: str) -> float:
        """F1 of the reply's words and those of the likest answer, as LongBench (arXiv 2308.14508) computes it."""
        return max(_f1(_words(reply), _words(answer)) for answer in self.answers)


def _words(text: str) -> Counter[str]:
    """Words without case, punctuation and articles."""
    return Counter(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _f1(reply: Counter[str], answer: Counter[str]) -> float:
    return 2 * (reply & answer).total() / max(reply.total() + answer.total(), 1)


def read_questions() -> tuple[BookQuestion, ...]:
    """All of our questions, in the order of the book."""
    records = (record for _, record in read_objects(QUESTIONS, "questions"))
    return tuple(BookQuestion(**{**record, "answers": tuple(record["answers"])}) for record in records)


@dataclass(frozen=True)
class Part:
    """A part of a book, and the questions that it answers."""

    text: str
    questions: tuple[BookQuestion, ...]


def parts_of(book: str, questions: Sequence[BookQuestion], length: int, count: Callable[[str], int]) -> Iterator[Part]:
    """The parts of a book that answer questions. Each question is in the first one that has its passage.

    A part is a run of paragraphs of at most `length` tokens as `count` counts them, or a longer paragraph; 0 makes
    the book one part.
    """
    left = list(questions)
    for text in _pieces(book, length, count) if length else [book]:
        answered = tuple(question for question in left if question.end(text) is not None)
        if answered:
            left = [question for question in left if question not in answered]
            yield Part(text, answered)


def _pieces(book: str, length: int, count: Callable[[str], int]) -> Iterator[str]:
    """The whole book, as runs of paragraphs."""
    run, size = list[str](), 0
    for paragraph in book.split("\n\n"):
        tokens = count(f"{paragraph}\n\n")
        if run and size + tokens > length:
            yield "\n\n".join(run)
            run, size = [], 0
        run.append(paragraph)
        size += tokens
    yield "\n\n".join(run)
