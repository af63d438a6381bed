"""Decides by words which passages are read again before the reply to a message. Knows neither model nor cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy

from h2o_stream.recall.dialogue import AROUND, Statement, label
from h2o_stream.recall.dialogue import find as find_statements
from h2o_stream.recall.lists import answers, asks_for_all, without_quantities
from h2o_stream.recall.passage import Candidate, Passage, Verdict
from h2o_stream.recall.passages import cut, excerpt, sentences
from h2o_stream.recall.terms import (
    COMMON,
    Floats,
    TermWeights,
    first_person,
    is_question,
    is_request,
    quotes_question,
    words,
)

PERSONAL_THRESHOLD = 0.32
"""Lowest score that is recalled of what users told, when they ask about themselves."""

THRESHOLD = 0.7
"""The same when they ask about other things, and of files and pastes. With 0.84, one of 30 facts is not found in its
own words."""

REPLY_THRESHOLD = 0.99
"""The same of replies: facts are what users say. With 0.7, more than twice as many of MT-Bench's turns recall
something, and as many facts are found."""

HELD = 0.9
"""Share of a passage's tokens from which on it needs no reading, because the heads that copy still hold them."""

_FOUND = 24
"""Passages taken from each search, and related words that are searched for each term. Twice as many find no more."""

_SHOWN = 12
"""Most candidates."""

_BESIDE = 0.75
"""Share of the best rank that others need to be recalled beside it. With 0.45, 1.22 passages are read for a question
instead of 1.04, and as many facts are found."""

_SAME, _REPLACED = 0.5, 0.7
"""Share of what an older passage covers, from which on a newer one that covers it as well goes first, and is read
alone. Read with what it contradicts, in the best order, the model gave the old answer 5 times of 20, and never without
it; with one share for both, passages that only touch the subject replace others, or newer ones come second."""

_VALUE = 2.0
"""Most weight of the words that only the older one has then: two or three rare ones, such as a date with a time."""

_LISTED_VALUE = 1.0
"""The same where several things are asked for: one rare word, the new value. With another one it is another thing."""

_TOUCHED, _NAMED = 0.15, 0.6
"""Share of a request that a passage has in the same words, from which on and up to which it is taken to be about
another thing if the rarest word is missing: the coffee that I always drink, where it is the tea.

With this and the words of families, of 15 questions about what was never said 3 read something in place of 8, and as
many facts are found."""

_LIST = 3
"""Passages to read from which on they are taken for a list."""

_LONG = 400
"""Characters from which on a message is taken to be text with a question."""

_SHORT = 240
"""Characters of a passage that is about the user even if it does not say so."""

_READ = 5
"""Most passages that are read of what several people say."""

_SURE, _SURE_EVIDENCE = 0.6, 1.2
"""Score, and evidence in a dialogue, below which a passage may well not say what is asked for: in a dialogue the right
one is read in 61% of the questions below, and in 81% above."""

_MOST_TERMS = 24
"""Most terms of a message."""

_Part = tuple[str, list[str]]


@dataclass
class _Match:
    """A passage and its best sentence.

    Attributes:
        personal: the user told it, about themselves or in few words.
        covered: how much of the weight of each term of the message it covers, [T].
        score: its sum.
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


class _Limits(NamedTuple):
    """What is read of the passages that match.

    Attributes:
        value: most weight of the words that only an older passage has, for a newer one to replace it.
        budget: tokens of all excerpts.
        most: tokens of the first excerpt, which is read even if it exceeds the budget; a longer one is cut.
        room: tokens of an excerpt up to which it includes sentences around the best one.
    """

    value: float
    budget: int
    most: int
    room: int


def decide(
    message: str,
    index: _Index,
    terms: TermWeights,
    held: Callable[[int, int], float],
    budget: int,
    list_budget: int,
    count_tokens: Callable[[str], int],
    answer: Callable[[str], Passage | None],
) -> list[Candidate]:
    """The passages worth reading again before the reply to a message, best first, at most 12, with verdicts.

    `held` returns the share of the tokens of a range that the heads that copy still hold, 0 to 1; `budget`,
    `list_budget`, for messages that ask for several things, and `count_tokens` are in tokens. `answer` finds what the
    user said that answers a question in other words.
    """
    request = _request(message)
    asked = without_quantities(_weights(request, terms))
    if not asked or not len(index):
        return []
    found = index.search(list(asked), _FOUND)
    if not label(message) and any(label(passage.text) for passage in found):
        said = index.around(list(asked), _FOUND, AROUND)
        if (statements := find_statements(asked, said, index.rarity, terms)) is not None:
            limits = _Limits(_LISTED_VALUE, list_budget, list_budget, 0)
            return _judge(_said_by_people(*statements), limits, terms, held, count_tokens)
    typed = _find_typed(asked, index, terms)
    others = set(found) - typed
    matcher = _Matcher(request, asked, terms, typed)
    matches, listed = matcher.with_listed_first(matcher.matches(_with_questions([*typed, *others], index)))
    if first_person(request) and is_question(request) and all(match.rank < 1 or match.of_another for match in matches):
        matches = _with_answer(answer(request), matches, len(asked))
    several = listed or asks_for_all(request)
    if several:
        limits = _Limits(_LISTED_VALUE, list_budget, list_budget, 0)
    else:
        limits = _Limits(_VALUE, budget, list_budget, budget // 2)
        for match in matches:
            match.rank /= 1 + match.rank if match.of_another else 1
        matches.sort(key=lambda match: match.of_another)
    return _judge(matches[:_SHOWN], limits, terms, held, count_tokens)


def _said_by_people(statements: Sequence[Statement], evidence: float) -> list[_Match]:
    """The first of these are read if there is evidence enough."""
    return [
        _Match(
            said.passage, said.sentence, False, numpy.zeros(0, numpy.float32), said.score,
            evidence if place < _READ else 0.0, said.terms, evidence >= _SURE_EVIDENCE,
        )
        for place, said in enumerate(statements)
    ]  # fmt: skip


def states(text: str) -> str:
    """The first sentence of a text that is no question; empty if there is none."""
    return next((part for part in _sentences(text) if not is_request(part)), "")


def _with_answer(answer: Passage | None, matches: list[_Match], terms: int) -> list[_Match]:
    """The matches, after a passage that was not found by words."""
    if answer is None:
        return matches
    best = _Match(answer, states(answer.text), True, numpy.zeros(terms, numpy.float32), 0.0, 1.0, ())
    return [best, *(match for match in matches if match.passage != answer)]


class _Index(Protocol):
    """What is used of `PassageIndex`."""

    def __len__(self) -> int: ...
    def search(self, terms: Sequence[str], limit: int, *, typed: bool = False) -> list[Passage]: ...
    def following(self, passage: Passage, count: int) -> list[Passage]: ...
    def around(self, terms: Sequence[str], limit: int, distance: int) -> dict[int, Passage]: ...
    def rarity(self, terms: Sequence[str]) -> Floats: ...


def _request(message: str) -> str:
    """The part of a message that asks: its questions, or its last sentence, if it is long."""
    if len(message) < _LONG:
        return message
    parts = _sentences(message)
    questions = [part for part in parts if is_question(part)]
    return " ".join(questions or parts[-1:])


def _sentences(text: str) -> list[str]:
    return [text[part.start : part.stop] for part in sentences(text)]


def _weights(text: str, terms: TermWeights) -> dict[str, float]:
    """The informative words of a text, heaviest first, and what they weigh beyond a common word, 0 to 1."""
    weights = {word: (terms.weight(word) - COMMON) / (1 - COMMON) for word in words(text)}
    informative = sorted(((weight, word) for word, weight in weights.items() if weight > 0), reverse=True)
    return {word: weight for weight, word in informative[:_MOST_TERMS]}


def _find_typed(asked: dict[str, float], index: _Index, terms: TermWeights) -> set[Passage]:
    """What the user told with a term or a related word in it."""
    related = terms.related(list(asked), _FOUND)
    others = [word for row in zip(*related.values(), strict=False) for word in row]
    return set(index.search([*asked, *others], 2 * _FOUND, typed=True))


def _with_questions(passages: list[Passage], index: _Index) -> dict[Passage, Passage]:
    """The passages and the replies to the questions among them; each with the question, or with itself."""
    answers = {passage: passage for passage in passages}
    for passage in passages:
        if passage.role == "user" and is_question(passage.text):
            for reply in index.following(passage, 2):
                if reply.turn == passage.turn and reply.role == "assistant":
                    answers[reply] = passage
    return answers


class _Matcher:
    """Scores passages by the words of a message."""

    def __init__(self, request: str, asked: dict[str, float], terms: TermWeights, typed: set[Passage]) -> None:
        self._request, self._asked, self._terms, self._typed = request, list(asked), terms, typed
        self._about_user = first_person(request)
        self._weights = numpy.array(list(asked.values()), numpy.float32)
        self._weights /= self._weights.sum()
        self._columns: dict[str, int] = {}
        self._table = self._same = numpy.empty(0, numpy.float32)
        self._new: list[bool] = []

    def matches(self, passages: dict[Passage, Passage]) -> list[_Match]:
        """The best sentence of each passage that may answer; best first, but the newest of those that agree."""
        texts = {passage.text for pair in passages.items() for passage in pair}
        parts = {text: [(part, words(part)) for part in _sentences(text)] for text in texts}
        others = list({word: None for rows in parts.values() for _, row in rows for word in row})
        self._columns = {word: column for column, word in enumerate(others)}
        self._table, self._same = self._terms.matching(self._asked, others), self._terms.same(self._asked, others)
        known = set(words(self._request))
        self._new = [word not in known and self._terms.weight(word) > COMMON + 0.1 for word in others]
        scored = [self._match(passage, parts[passage.text], parts[asked.text]) for passage, asked in passages.items()]
        return _newest_first(sorted(filter(None, scored), key=lambda match: (-match.rank, -match.passage.start)))

    def with_listed_first(self, matches: list[_Match]) -> tuple[list[_Match], bool]:
        """The matches, first those that each answer one part of a request, the last part first; and whether any do."""
        covered = numpy.array([match.covered for match in matches]).reshape(-1, len(self._asked))
        rows = answers(self._request, self._asked, self._weights, covered, THRESHOLD)
        listed = [matches[row] for row in reversed(rows)]
        for match in listed:
            match.rank = max(1.0, matches[0].rank)
        return [*listed, *(match for row, match in enumerate(matches) if row not in rows)], bool(rows)

    def _match(self, passage: Passage, parts: list[_Part], question: list[_Part]) -> _Match | None:
        around = [self._covered(row, self._table) for _, row in question if question is not parts]
        best: _Match | None = None
        for text, tokens in parts:
            if (is_request(text) and not quotes_question(text)) or not any(
                self._new[self._columns[word]] for word in tokens
            ):
                continue
            covered = numpy.max([self._covered(tokens, self._table), *around], axis=0) * self._weights
            score = float(covered.sum())
            personal = passage in self._typed and (first_person(text) or len(passage.text) <= _SHORT)
            rank = score / self._threshold(passage, personal)
            of_another = not around and self._is_of_another(tokens)
            if best is None or (not of_another, rank) > (not best.of_another, best.rank):
                names = self._names(covered)
                best = _Match(passage, text, personal, covered, score, rank, names, score >= _SURE, of_another)
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

    def _covered(self, row: list[str], table: Floats) -> Floats:
        """How well each term is matched by any of the words, [T]."""
        if not row:
            return numpy.zeros(len(self._asked), numpy.float32)
        covered: Floats = table[:, [self._columns[word] for word in row]].max(1)
        return covered

    def _names(self, covered: Floats) -> tuple[str, ...]:
        shares = (covered / self._weights).tolist()
        return tuple(word for word, share in zip(self._asked, shares, strict=True) if share > 0.1)


def _newest_first(matches: list[_Match]) -> list[_Match]:
    """Move each match before the older ones that it may contradict, and give it their rank."""
    ordered: list[_Match] = []
    for match in matches:
        place = len(ordered)
        while place and _agreement(match, ordered[place - 1]) >= _SAME:
            place -= 1
            match.rank = max(match.rank, ordered[place].rank)
        ordered.insert(place, match)
    return ordered


def _rest(match: _Match, other: _Match, terms: TermWeights) -> float:
    """Weight of the words of a match that are neither in the other match nor what was asked for."""
    known = {*words(other.sentence), *match.terms}
    return sum(weight for word, weight in _weights(match.sentence, terms).items() if word not in known)


def _agreement(newer: _Match, older: _Match) -> float:
    """Share of what the older match covers that the newer one covers too; 0 if these are not two things users told."""
    if newer.passage.turn <= older.passage.turn or not (newer.personal and older.personal):
        return 0.0
    same = newer.covered >= 0.95 * older.covered
    return float(older.covered[same].sum() / (older.covered.sum() or 1))


def _judge(
    matches: list[_Match],
    limits: _Limits,
    terms: TermWeights,
    held: Callable[[int, int], float],
    count_tokens: Callable[[str], int],
) -> list[Candidate]:
    candidates: list[Candidate] = []
    best = max((match.rank for match in matches), default=0.0)
    user_answers = any(match.rank >= 1 and match.passage.role == "user" for match in matches)
    known: list[_Match] = []
    left = limits.budget
    for match in matches:
        passage = match.passage
        share = held(passage.start, passage.stop)
        text, size = excerpt(passage.text, match.sentence, min(left, limits.room), count_tokens)
        if (name := label(passage.text)) and not text.startswith(name):
            text = name + text
            size = count_tokens(text)
        is_first = left == limits.budget
        available = limits.most if is_first else left
        if is_first and size > available:
            text = cut(text, match.terms, available / size)
            size = count_tokens(text)
        verdict: Verdict = "recalled"
        if match.rank < max(1, _BESIDE * best):
            verdict = "loosely related"
        elif user_answers and passage.role == "assistant":
            verdict = "said by the model"
        elif any(not _rest(match, other, terms) for other in known):
            verdict = "repeated"
        elif any(
            _agreement(newer, match) >= _REPLACED and _rest(match, newer, terms) <= limits.value for newer in known
        ):
            verdict = "outdated"
        elif share >= HELD:
            verdict = "still held"
        elif size > available:
            verdict = "no room"
        if verdict in ("recalled", "still held"):
            known.append(match)
        left -= size if verdict == "recalled" else 0
        candidates.append(Candidate(passage, text, match.score, match.terms, share, size, verdict, match.sure))
    return _completed(candidates, left)


def _completed(candidates: list[Candidate], left: int) -> list[Candidate]:
    """The candidates; of several, those that are still held are read as well, for a reply repeats the list it reads."""
    if sum(candidate.verdict == "recalled" for candidate in candidates) < _LIST:
        return candidates
    completed = list[Candidate]()
    for candidate in candidates:
        read = candidate.verdict == "still held" and candidate.tokens <= left
        left -= candidate.tokens if read else 0
        completed.append(replace(candidate, verdict="recalled") if read else candidate)
    return completed
