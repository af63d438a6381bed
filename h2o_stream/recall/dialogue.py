"""Finds what answers a question about one of several people whose turns begin with their names, as in chat logs.

What counts is who says something of whom: "I" in the turns of a person, "you" in those of others. If what is said of
the others answers better, the question is about the wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import lru_cache
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from h2o_stream.recall.matching import Match
from h2o_stream.recall.passage import Passage
from h2o_stream.recall.passages import sentence_texts
from h2o_stream.recall.speech import LABEL, first_person, is_question, second_person
from h2o_stream.recall.terms import Floats, TermWeights, words

AROUND = 2
"""Passages before and after one that are its context."""

_CONTEXT = {1: 0.8, 2: 0.5, -1: 0.3}
"""How much a word counts in the turn before a passage, in the one before that, and in the next one: a reply leaves out
what was asked."""

_MOST = 12
"""Passages that are returned."""

_RELATED = 0.4
"""How much a word of nearly the same meaning counts."""

_OF_OTHERS, _OF_NOBODY, _ASKING = 0.6, 0.8, 0.7
"""How much a sentence counts that speaks of others alone, of nobody, and one that asks."""

_BY_OTHERS = 0.6
"""How much a passage counts, in the order of all, that others say."""

_ANY = 1.0
"""What is added to the weight of a term before it is multiplied by its rarity. Without the weight, or the rarity, the
right one is among the first five in 2 to 4% less."""

_EXACT = 0.5
"""How much the best coverage in the same words counts beside what is said of the person more than of others."""

_READ, _AMONG = 5, 0.5
"""Most passages that are read of what several people say, and the least share of the best one's score."""

_SURE_EVIDENCE = 1.2
"""Evidence from which on a dialogue is likely to say what is asked for: below, the right passage is read in 61% of the
questions that read something, above in 81%."""

_THRESHOLD = 0.3
"""Evidence from which on passages are read again. Of the first three dialogues of LoCoMo (497 questions) 14% of those
that nothing answers have it, and a right passage is read for 55% of the others."""


class _Sentence(NamedTuple):
    """A sentence: its words, and how much it is about the one who says it, about others, and no question, 0 to 1."""

    text: str
    words: Sequence[str]
    own: float
    others: float
    states: float


def said_by_people(
    asked: Mapping[str, float],
    numbered: Mapping[int, Passage],
    rarity: Callable[[Sequence[str]], Floats],
    terms: TermWeights,
) -> list[Match] | None:
    """What may answer a question, best first.

    None if it names nobody who speaks in these passages, or nothing else, or if there is one speaker: "Note: ...".

    Args:
        asked: the terms of the question and their weights.
        numbered: passages by number, those that were found with those around them.
        rarity: returns how rare terms are, [T].
        terms: tells which words mean nearly the same.
    """
    speakers = _speakers(numbered)
    everybody = set(speakers.values())
    people, sought = everybody.intersection(asked), [word for word in asked if word not in everybody]
    if not (people and sought) or len(everybody) < 2:
        return None
    passages, is_person = _about(people, numbered, speakers)
    weights = rarity(sought) * numpy.array([_ANY + asked[word] for word in sought], numpy.float32)
    coverage = _Coverage(sought, weights / weights.sum(), passages, terms)
    if len(people) == 1:
        scores, exact, best = coverage.of(is_person)
        evidence = scores.max() - coverage.of(~is_person)[0].max()
        order = numpy.where(is_person, scores, _BY_OTHERS * scores)
    else:
        scores, exact, best = coverage.of(None)
        evidence, order = scores.max(), scores
    evidence = float(evidence + _EXACT * exact) / _THRESHOLD
    rows = [row for row in (-order).argsort(kind="stable")[:_MOST] if scores[row] > 0]
    return [
        Match(
            passages[row],
            best[row].text,
            False,
            numpy.zeros(0, numpy.float32),
            float(scores[row]),
            evidence if place < _READ and scores[row] >= _AMONG * scores[rows[0]] else 0.0,
            coverage.terms(best[row]),
            evidence >= _SURE_EVIDENCE,
        )
        for place, row in enumerate(rows)
    ]


class _Coverage:
    """How much passages of a dialogue cover of what is asked."""

    def __init__(self, sought: list[str], weights: Floats, passages: Sequence[Passage], terms: TermWeights) -> None:
        self._sought, self._weights = sought, weights
        parsed = [_parse(passage.text) for passage in passages]
        self._sentences = [sentence for some in parsed for sentence in some]
        self._starts = numpy.cumsum([0, *map(len, parsed[:-1])])
        self._sizes = list(map(len, parsed))
        self._turns = numpy.array([passage.turn for passage in passages])
        rows = [sentence.words for sentence in self._sentences]
        columns = {word: column for column, word in enumerate(dict.fromkeys(word for row in rows for word in row))}
        flat, starts = [columns[word] for row in rows for word in row], numpy.cumsum([0, *map(len, rows[:-1])])
        same = terms.same(sought, list(columns))
        related = numpy.maximum(same, _RELATED * terms.matching(sought, list(columns)))
        self._same, self._related = (
            numpy.maximum.reduceat(table[:, flat], starts, axis=1) for table in (same, related)
        )  # [T, sentences]

    def of(self, is_person: NDArray[numpy.bool_] | None) -> tuple[Floats, float, list[_Sentence]]:
        """For what is said of the person, or of anybody: how much each passage covers with those around it, [N]; how
        much the best one covers in the same words; and the best sentence of each.
        """
        numbers = numpy.array([sentence[2:] for sentence in self._sentences], numpy.float32)
        about = numpy.ones(len(numbers), numpy.float32)
        if is_person is not None:
            about = numpy.where(is_person.repeat(self._sizes), numbers[:, 0], numbers[:, 1])
        stated = about * numbers[:, 2]
        covered, context = self._best(self._related * stated), self._best(self._related * about)
        for distance, share in _CONTEXT.items():
            near = abs(self._turns - numpy.roll(self._turns, distance)) <= abs(distance)
            covered = numpy.maximum(covered, share * near * numpy.roll(context, distance, axis=1))
        exact = float((self._weights @ self._best(self._same * stated)).max())
        values = self._weights @ (self._related * stated)
        best = [
            self._sentences[start + int(values[start : start + size].argmax())]
            for start, size in zip(self._starts, self._sizes, strict=True)
        ]
        return self._weights @ covered, exact, best

    def terms(self, sentence: _Sentence) -> tuple[str, ...]:
        """What a sentence covers."""
        column = self._related[:, self._sentences.index(sentence)]
        return tuple(word for word, share in zip(self._sought, column, strict=True) if share > 0.1)

    def _best(self, covered: Floats) -> Floats:
        best: Floats = numpy.maximum.reduceat(covered, self._starts, axis=1)
        return best


def _speakers(numbered: Mapping[int, Passage]) -> dict[int, str]:
    """Who says the passages that somebody says, in lower case. What follows in a turn is of its speaker."""
    speakers, turn, speaker = dict[int, str](), (0, ""), ""
    for number, passage in sorted(numbered.items()):
        match = LABEL.match(passage.text)
        if match or (passage.turn, passage.role) != turn:
            speaker = match["name"].casefold() if match else ""
        turn = passage.turn, passage.role
        if speaker:
            speakers[number] = speaker
    return speakers


def _about(
    people: Set[str], numbered: Mapping[int, Passage], speakers: Mapping[int, str]
) -> tuple[list[Passage], NDArray[numpy.bool_]]:
    """The passages that somebody says, or that name the people, in order; and which are of the people."""
    of_people = {
        number: speakers.get(number) in people or number not in speakers
        for number in sorted(numbered)
        if number in speakers or not people.isdisjoint(words(numbered[number].text))
    }
    return [numbered[number] for number in of_people], numpy.array(list(of_people.values()))


@lru_cache(maxsize=4096)
def _parse(text: str) -> tuple[_Sentence, ...]:
    """The sentences of a text. Questions about a dialogue meet the same passages again and again."""
    return tuple(map(_sentence, sentence_texts(text)))


def _sentence(text: str) -> _Sentence:
    own, others = first_person(text), second_person(text)
    of_own, of_others = (1.0 if one else _OF_OTHERS if own or others else _OF_NOBODY for one in (own, others))
    return _Sentence(text, tuple(words(text)) or ("",), of_own, of_others, _ASKING if is_question(text) else 1.0)
