"""Decides by words which passages are read again before the reply to a message. Knows neither the model nor the cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from h2o_stream.recall.passage import Candidate, Passage, Verdict
from h2o_stream.recall.passages import sentences
from h2o_stream.recall.terms import TermWeights, first_person, words

THRESHOLD, OWN_THRESHOLD = 0.75, 0.3
"""Lowest scores that are recalled; the second for what users say of themselves, when they ask of themselves."""

HELD = 0.9
"""Share of a passage's tokens from which on it needs no reading, because the heads that copy still hold them."""

_COMMON = 0.2
"""Weight up to which a word says nothing: "what" weighs 0.18, "did" 0.28, "job" 0.40 (embedded model)."""

_LEAST = 0.6
"""Least weight of all terms of a message that asks for something, unless it asks of the user: "sure?" weighs less."""

_FAR, _NEAR, _RELATED = 0.15, 0.5, 0.8
"""Cosine at which a word begins to count as another one, from which on it counts most, and how much that is."""

_INFLECTED = 0.95
"""How much "works" counts as "work"."""

_CONTEXT = 0.8
"""How much a word counts that is in another sentence of the passage, or in the question that a reply answers."""

_REPLY = 0.85
"""How much a reply counts: facts are what users say."""

_NEIGHBOURS = 20
"""Related words that are searched for each term."""

_FOUND = 24
"""Passages taken from each search."""

_SHOWN = 8
"""Most candidates."""

_SAME = 0.5
"""Share of what an older passage covers, from which on a newer one that covers it too goes first."""

_LONG = 400
"""Characters from which on a message is taken to be text with a question."""

_SHORT = 240
"""Characters of a passage that is about the user even if it does not say so."""

_MESSAGE_TERMS = 24
"""Most terms of a message."""

_QUESTION = re.compile(r"[?？؟;՞]\s*[\"'”’»)\]]*\s*$")


_Part = tuple[str, list[str]]


@dataclass
class _Match:
    """A passage and its best sentence, and how much of the weight of each term of the message it covers [T]."""

    passage: Passage
    sentence: str
    own: bool
    covered: Tensor
    score: float
    terms: tuple[str, ...]


def decide(
    message: str,
    index: _Index,
    terms: TermWeights,
    held: Callable[[int, int], float],
    budget: int,
    count_tokens: Callable[[str], int],
) -> list[Candidate]:
    """The passages worth reading again before the reply to a message, best first, at most 8, with verdicts.

    Args:
        message: what the user says now.
        index: the passages so far.
        terms: weights of words.
        held: share of the tokens of a range that the heads that copy still hold, 0 to 1.
        budget: most tokens to read again.
        count_tokens: length of a text in tokens.
    """
    request = _request(message)
    asked = _weights(request, terms)
    own = first_person(request)
    if not asked or sum(asked.values()) < (0 if own else _LEAST) or not len(index):
        return []
    matcher = _Matcher(asked, own, terms)
    told, others = _find(asked, index, terms)
    matches = matcher.matches(_with_questions([*told, *others], index), told)
    return _judge(matches, held, budget, count_tokens)


class _Index(Protocol):
    def __len__(self) -> int: ...
    def search(self, terms: Sequence[str], limit: int, *, told: bool = False) -> list[Passage]: ...
    def following(self, passage: Passage, count: int) -> list[Passage]: ...


def _weights(text: str, terms: TermWeights) -> dict[str, float]:
    """The informative words of a text, heaviest first, and what they weigh beyond a common word."""
    weights = {word: (terms.weight(word) - _COMMON) / (1 - _COMMON) for word in words(text)}
    informative = sorted(((weight, word) for word, weight in weights.items() if weight > 0), reverse=True)
    return {word: weight for weight, word in informative[:_MESSAGE_TERMS]}


def _request(message: str) -> str:
    """The part of a message that asks: its questions, or its last sentence, if it is long."""
    if len(message) < _LONG:
        return message
    parts = [message[part.start : part.stop] for part in sentences(message)]
    questions = [part for part in parts if _QUESTION.search(part)]
    return " ".join(questions or parts[-1:])


def _find(asked: dict[str, float], index: _Index, terms: TermWeights) -> tuple[set[Passage], set[Passage]]:
    """What the user told with a term or a related word in it, and other passages with a term."""
    related = terms.related(list(asked), _NEIGHBOURS)
    others = [word for row in zip(*related.values(), strict=False) for word in row]
    told = {*index.search(list(asked), _FOUND, told=True), *index.search(others, _FOUND, told=True)}
    return told, {*index.search(list(asked), _FOUND)} - told


def _with_questions(passages: list[Passage], index: _Index) -> dict[Passage, Passage]:
    """The passages and the replies to the questions among them; each with the question, or with itself."""
    answers = {passage: passage for passage in passages}
    for passage in passages:
        if passage.role == "user" and _QUESTION.search(passage.text):
            for reply in index.following(passage, 2):
                if reply.turn == passage.turn and reply.role == "assistant":
                    answers[reply] = passage
    return answers


class _Matcher:
    """Scores passages by the words of a message."""

    def __init__(self, asked: dict[str, float], own: bool, terms: TermWeights) -> None:
        self._asked, self._own, self._terms = asked, own, terms
        self._weights = torch.tensor(list(asked.values()))
        self._columns: dict[str, int] = {}
        self._table = torch.empty(0)

    def matches(self, passages: dict[Passage, Passage], told: set[Passage]) -> list[_Match]:
        """The best sentence of each passage that may answer, best first."""
        texts = {p.text for pair in passages.items() for p in pair}
        parts = {
            text: [(text[s.start : s.stop], words(text[s.start : s.stop])) for s in sentences(text)] for text in texts
        }
        self._columns = {word: 0 for rows in parts.values() for _, row in rows for word in row}
        self._columns = {word: column for column, word in enumerate(self._columns)}
        self._table = _matching(list(self._asked), list(self._columns), self._terms)
        found = [
            self._match(passage, parts[passage.text], parts[question.text], passage in told)
            for passage, question in passages.items()
        ]
        return _newest_first(sorted(filter(None, found), key=lambda match: (-match.score, -match.passage.start)))

    def _match(self, passage: Passage, parts: list[_Part], question: list[_Part], told: bool) -> _Match | None:
        context = torch.stack([self._covered(row) for _, row in (*parts, *question)]).amax(0) * _CONTEXT
        best: _Match | None = None
        for text, row in parts:
            if _QUESTION.search(text) or not self._adds(row):
                continue
            matched = torch.maximum(self._covered(row), context)
            score = float((matched * self._weights).sum() / self._weights.sum())
            if passage.role != "user":
                score *= _REPLY
            own = told and (first_person(text) or len(passage.text) <= _SHORT)
            score /= OWN_THRESHOLD if own and self._own else THRESHOLD
            if best is None or score > best.score:
                names = tuple(w for w, value in zip(self._asked, matched.tolist(), strict=True) if value > 0.1)
                best = _Match(passage, text, own, matched * self._weights, score, names)
        return best

    def _covered(self, row: list[str]) -> Tensor:
        """How well each term is matched by any of the words, [T]."""
        if not row:
            return torch.zeros(len(self._asked))
        return self._table[:, [self._columns[word] for word in row]].amax(1)

    def _adds(self, row: list[str]) -> bool:
        """Whether there is an informative word that the message has not."""
        new = (word for word in row if float(self._table[:, self._columns[word]].max()) < _INFLECTED)
        return any(self._terms.weight(word) >= _COMMON + 0.1 for word in new)


def _newest_first(matches: list[_Match]) -> list[_Match]:
    """Move each match before the older ones that it may contradict."""
    ordered: list[_Match] = []
    for match in matches:
        place = len(ordered)
        while place and _contradicts(match, ordered[place - 1]):
            place -= 1
        ordered.insert(place, match)
    return ordered


def _contradicts(newer: _Match, older: _Match) -> bool:
    """Whether the newer one says something about most of what the older one is about."""
    if newer.passage.start < older.passage.start or newer.own < older.own or newer.score < max(1, _SAME * older.score):
        return False
    return float(torch.minimum(newer.covered, older.covered).sum()) >= _SAME * float(older.covered.sum())


def _matching(asked: list[str], others: list[str], terms: TermWeights) -> Tensor:
    """How much each of the other words counts as each of the asked words, [T, W]."""
    table = ((terms.similarity(asked, others) - _FAR) / (_NEAR - _FAR)).clamp(0, 1) * _RELATED
    table *= torch.tensor([terms.weight(word) > _COMMON for word in others])
    for row, word in enumerate(asked):
        for column, other in enumerate(others):
            if word == other:
                table[row, column] = 1
            elif word[:4] == other[:4] and _inflected(word, other):
                table[row, column] = _INFLECTED
    return table


def _inflected(word: str, other: str) -> bool:
    """Whether two words share so long a beginning that they are forms of one word."""
    shared = next((i for i, (a, b) in enumerate(zip(word, other, strict=False)) if a != b), min(len(word), len(other)))
    return shared >= 4 and shared >= 0.6 * max(len(word), len(other)) and max(len(word), len(other)) - shared <= 3


def _judge(
    matches: list[_Match], held: Callable[[int, int], float], budget: int, count_tokens: Callable[[str], int]
) -> list[Candidate]:
    candidates: list[Candidate] = []
    left = budget
    for match in matches[:_SHOWN]:
        passage = match.passage
        share = held(passage.start, passage.stop)
        whole = count_tokens(passage.text)
        excerpt, size = (passage.text, whole) if whole <= 60 else (match.sentence, count_tokens(match.sentence))
        verdict: Verdict = "recalled"
        if match.score < 1:
            verdict = "loosely related"
        elif share >= HELD:
            verdict = "still held"
        elif size > left:
            verdict = "no room"
        else:
            left -= size
        candidates.append(Candidate(passage, excerpt, match.score, match.terms, share, size, verdict))
    return candidates
