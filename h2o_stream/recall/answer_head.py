"""The answer head: one head of the model that looks from a question to the passage that answers it, in any words.

Questions and passages stand alone, each as the first message of a conversation. A passage's score is the mean over the
question's tokens of the largest product of their queries with any of its keys, less that of messages that ask nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy

from h2o_stream.recall.terms import Floats

Projections = Sequence[tuple[Floats, Floats]]
"""Queries [n, Hq, D] and keys [n, Hkv, D] of a text, for each layer."""

MIN_RIGHT = 0.6
"""Share of the pairs that a head must match for it to be an answer head."""

_NEUTRAL = ("Thanks, that was helpful.", "Okay, tell me more.", "Hello, how are you today?", "That is interesting.")
"""Messages that ask nothing."""

_PAIRS = Path(__file__).with_name("pairs.jsonl")


@dataclass(frozen=True)
class AnswerHead:
    """A head that answers.

    Attributes:
        layer: layer that contains the head.
        query_head: its number in the layer.
        min_score: score of the worst right passage among our pairs.
    """

    layer: int
    query_head: int
    min_score: float


@dataclass(frozen=True)
class Text:
    """A text as the model reads it.

    Attributes:
        tokens: all that is read.
        start: first token of the text.
        stop: end of the text; keys after it count, queries do not.
    """

    tokens: list[int]
    start: int
    stop: int

    @property
    def around(self) -> int:
        """How many tokens come before and after the text."""
        return len(self.tokens) - (self.stop - self.start)


Place = Callable[[str], Text]
"""How the model reads a text."""


class Reader:
    """Reads texts by one head.

    Args:
        head: the answer head.
        project: projects tokens in the layers up to the head's.
        place: how the model reads a text.
    """

    def __init__(self, head: AnswerHead, project: Callable[[list[int]], Projections], place: Place) -> None:
        self.head, self._project, self._place = head, project, place

    def queries(self, text: str) -> Floats:
        """Queries of the tokens of a question, [n, D]."""
        return self._read(text)[0]

    def keys(self, text: str) -> Floats:
        """Keys of the tokens of a passage, [m, D]."""
        return self._read(text)[1]

    def baseline(self, keys: Floats) -> float:
        """The score of a passage for messages that ask nothing."""
        return float(numpy.mean([_match(queries, keys) for queries in self._neutral]))

    @cached_property
    def _neutral(self) -> list[Floats]:
        return [self.queries(text) for text in _NEUTRAL]

    def _read(self, text: str) -> tuple[Floats, Floats]:
        placed = self._place(text)
        queries, keys = self._project(placed.tokens)[self.head.layer]
        number, groups = self.head.query_head, queries.shape[1] // keys.shape[1]
        return queries[placed.start : placed.stop, number], keys[placed.start :, number // groups]


def score(queries: Floats, keys: Floats, baseline: float) -> float:
    """How well a passage answers a question."""
    return _match(queries, keys) - baseline


def find_head(project: Callable[[list[int]], Projections], place: Place) -> AnswerHead | None:
    """The head that matches most of our pairs of statements and questions; None if none matches enough.

    Args:
        project: projects tokens in all layers.
        place: see `Reader`.
    """
    pairs = [json.loads(line) for line in _PAIRS.read_text(encoding="utf-8").splitlines()]
    read = [(text, project(text.tokens)) for text in (place(pair["statement"]) for pair in pairs)]
    keys = [[layer[text.start :] for _, layer in layers] for text, layers in read]
    asked, neutral = (
        [[layer[text.start : text.stop] for layer, _ in project(text.tokens)] for text in map(place, texts)]
        for texts in ([pair["question"] for pair in pairs], _NEUTRAL)
    )
    scores = _matches(asked, keys) - _matches(neutral, keys).mean(0)
    right = scores.argmax(1) == numpy.arange(len(pairs))[:, None, None]
    layer, head = divmod(int(right.mean(0).argmax()), right.shape[2])
    is_right = right[:, layer, head]
    if is_right.mean() < MIN_RIGHT:
        return None
    best = scores[numpy.arange(len(pairs)), numpy.arange(len(pairs)), layer, head]
    return AnswerHead(layer, head, round(float(best[is_right].min()), 2))


def _match(queries: Floats, keys: Floats) -> float:
    return float((queries @ keys.T).max(1).mean())


def _matches(questions: list[list[Floats]], passages: list[list[Floats]]) -> Floats:
    """[questions, passages, layers, heads]; all layers have as many heads."""
    matches = numpy.empty((len(questions), len(passages), len(questions[0]), questions[0][0].shape[1]), numpy.float32)
    for i, question in enumerate(questions):
        for j, passage in enumerate(passages):
            for layer, (queries, keys) in enumerate(zip(question, passage, strict=True)):
                grouped = queries.reshape(len(queries), keys.shape[1], -1, queries.shape[2])
                products = numpy.einsum("nkgd,mkd->kgnm", grouped, keys, optimize=True)
                matches[i, j, layer] = products.max(3).mean(2).reshape(-1)
    return matches
