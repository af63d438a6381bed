"""Scores passages by the words of a message. Knows neither model nor cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy

from h2o_stream.recall.lists import answers
from h2o_stream.recall.passage import Passage
from h2o_stream.recall.passages import sentence_texts
from h2o_stream.recall.speech import first_person, is_request, is_task, label, owners, quotes_question
from h2o_stream.recall.terms import Floats, TermWeights, words

PERSONAL_THRESHOLD = 0.32
"""Lowest score that is recalled of what users told, when they ask about themselves."""

THRESHOLD = 0.7
"""Lowest score when they ask about other things, and of files and pastes. With 0.84, one of 30 facts is not found in
its own words."""

REPLY_THRESHOLD = 0.99
"""Lowest score of replies: facts are what users say. With 0.7, more than twice as many of MT-Bench's turns recall
something, and as many facts are found."""

_SAME = 0.5
"""Share of what an older passage covers, from which on a newer one that covers it as well goes first."""

_TOUCHED, _NAMED = 0.15, 0.6
"""Share of a request that a passage has in the same words, from which on and up to which it is taken to be about
another thing if the rarest word is missing: the coffee that I always drink, where it is the tea.

With this and the words of families, of 15 questions about what was never said 3 read something in place of 8, and as
many facts are found."""

_OF_ANOTHER = 0.4
"""How much a word counts that is said of another owner: of my dog's name, where my name is asked for.

With this, of those 15 questions 2 read something in place of 3."""

_NEW = 0.3
"""Weight from which on a word that was not asked for may be an answer: that of numbers below 100."""

_SURE = 0.6
"""Score from which on a passage is likely to say what is asked for."""

_SHORT = 240
"""Characters of a passage that is about the user even if it does not say so."""

_Part = tuple[str, list[str]]


@dataclass
class Match:
    """A passage and its best sentence.

    Attributes:
        personal: the user told it, about themselves or in few words.
        covered: how much of the weight of each term of the message it covers, [T].
        score: the sum of what it covers.
        rank: the score by the threshold that it has to reach.
        sure: whether it is likely to say it.
        of_another: it says the same of another thing than the one that is asked for.
    """

    passage: Passage
    sentence: str
    personal: bool
    covered: Floats
    score: float
    rank: float
    terms: tuple[str, ...]
    sure: bool = True
    of_another: bool = False


class Matcher:
    """Scores passages by the words of a message."""

    def __init__(self, request: str, asked: dict[str, float], terms: TermWeights, typed: set[Passage]) -> None:
        self._request, self._asked, self._terms, self._typed = request, list(asked), terms, typed
        self._about_user = first_person(request)
        self._owners = {word: owner for word, owner in owners(request).items() if word in asked}
        self._weights = numpy.array(list(asked.values()), numpy.float32)
        self._weights /= self._weights.sum()
        self._columns: dict[str, int] = {}
        self._table = self._same = numpy.empty(0, numpy.float32)
        self._new: list[bool] = []

    def matches(self, passages: dict[Passage, Passage]) -> list[Match]:
        """The best sentence of each passage that may answer; best first, but the newest of those that agree."""
        texts = {passage.text for pair in passages.items() for passage in pair}
        parts = {text: [(part, words(part)) for part in sentence_texts(text)] for text in texts}
        others = list({word: None for rows in parts.values() for _, row in rows for word in row})
        self._columns = {word: column for column, word in enumerate(others)}
        self._table, self._same = self._terms.matching(self._asked, others), self._terms.same(self._asked, others)
        known = set(words(self._request))
        self._new = [word not in known and self._terms.weight(word) >= _NEW for word in others]
        scored = [self._match(passage, parts[passage.text], parts[asked.text]) for passage, asked in passages.items()]
        return _newest_first(sorted(filter(None, scored), key=lambda match: (-match.rank, -match.passage.start)))

    def with_listed_first(self, matches: list[Match]) -> tuple[list[Match], bool]:
        """The matches, first those that each answer one part of a request, the last part first; and whether any do."""
        covered = numpy.array([match.covered for match in matches]).reshape(-1, len(self._asked))
        rows = answers(self._request, self._asked, self._weights, covered, THRESHOLD)
        listed = [matches[row] for row in reversed(rows)]
        for match in listed:
            match.rank = max(1.0, matches[0].rank)
        return [*listed, *(match for row, match in enumerate(matches) if row not in rows)], bool(rows)

    def _match(self, passage: Passage, parts: list[_Part], question: list[_Part]) -> Match | None:
        around = [self._covered(row, self._table) for _, row in question if question is not parts]
        best: Match | None = None
        for text, tokens in parts:
            task = is_task(text)
            asks = is_request(text) or (task and self._about_user and not first_person(text))
            statement = tokens[len(words(label(text))) :]
            if (asks and not quotes_question(text)) or not any(self._new[self._columns[word]] for word in statement):
                continue
            stated = self._covered(tokens, self._table) * self._of_owners(text, tokens)
            covered = numpy.max([stated, *around], axis=0) * self._weights
            score = float(covered.sum())
            personal = passage in self._typed and not task and (len(passage.text) <= _SHORT or first_person(text))
            rank = score / self._threshold(passage, personal)
            of_another = not around and self._is_of_another(tokens)
            if best is None or (not of_another, rank) > (not best.of_another, best.rank):
                names = self._names(covered)
                best = Match(passage, text, personal, covered, score, rank, names, score >= _SURE, of_another)
        return best

    def _threshold(self, passage: Passage, personal: bool) -> float:
        if personal:
            return PERSONAL_THRESHOLD if self._about_user else THRESHOLD
        return THRESHOLD if passage.role == "user" else REPLY_THRESHOLD

    def _is_of_another(self, row: list[str]) -> bool:
        """Whether words say the same of another thing: they have some of the request, but not the rarest one."""
        same = self._covered(row, self._same)
        share = float(same @ self._weights)
        return bool(same[self._weights.argmax()] == 0 and _TOUCHED <= share < _NAMED)

    def _of_owners(self, text: str, row: list[str]) -> Floats:
        """How much each term counts in a text, by whose it is there, [T]."""
        shares, stated = numpy.ones(len(self._asked), numpy.float32), owners(text) if self._owners else {}
        for word in self._owners.keys() & stated:
            owner, other = self._owners[word], stated[word]
            if other != owner and other not in self._asked and owner not in row:
                shares[self._asked.index(word)] = _OF_ANOTHER
        return shares

    def _covered(self, row: list[str], table: Floats) -> Floats:
        """How well each term is matched by any of the words, [T]."""
        if not row:
            return numpy.zeros(len(self._asked), numpy.float32)
        covered: Floats = table[:, [self._columns[word] for word in row]].max(1)
        return covered

    def _names(self, covered: Floats) -> tuple[str, ...]:
        shares = (covered / self._weights).tolist()
        return tuple(word for word, share in zip(self._asked, shares, strict=True) if share > 0.1)


def _newest_first(matches: list[Match]) -> list[Match]:
    """Move each match before the older ones that it may contradict, and give it their rank."""
    ordered: list[Match] = []
    for match in matches:
        place = len(ordered)
        while place and agreement(match, ordered[place - 1]) >= _SAME:
            place -= 1
            match.rank = max(match.rank, ordered[place].rank)
        ordered.insert(place, match)
    return ordered


def agreement(newer: Match, older: Match) -> float:
    """Share of what the older match covers that the newer one covers too; 0 if these are not two things users told."""
    if newer.passage.turn <= older.passage.turn or not (newer.personal and older.personal):
        return 0.0
    same = newer.covered >= 0.95 * older.covered
    return float(older.covered[same].sum() / (older.covered.sum() or 1))
