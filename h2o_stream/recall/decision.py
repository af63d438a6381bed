"""Decides by words which passages are read again before the reply to a message. Knows neither model nor cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy

from h2o_stream.recall.dialogue import AROUND, said_by_people
from h2o_stream.recall.index import PassageIndex
from h2o_stream.recall.lists import asks_for_all, without_quantities
from h2o_stream.recall.matching import Match, Matcher, agreement
from h2o_stream.recall.passage import Candidate, Passage, Verdict
from h2o_stream.recall.passages import cut, excerpt, sentence_texts
from h2o_stream.recall.speech import first_person, is_question, is_request, label
from h2o_stream.recall.terms import COMMON, TermWeights, words

HELD = 0.9
"""Share of a passage's tokens from which on it needs no reading, because the heads that copy still hold them."""

_FOUND = 24
"""Passages taken from each search, and related words that are searched for each term. Twice as many find no more."""

_SHOWN = 12
"""Most candidates."""

_BESIDE = 0.75
"""Share of the best rank that others need to be recalled beside it. With 0.45, 1.22 passages are read for a question
instead of 1.04, and as many facts are found."""

_REPLACED = 0.7
"""Share from which on a newer one is read alone. Read with what it contradicts, in the best order, the model gave the
old answer 5 times of 20, and never without it; with `_SAME` for both, passages that only touch the subject replace
others, or newer ones come second."""

_VALUE = 2.0
"""Most weight of the words that only the older one has then: two or three rare ones, such as a date with a time."""

_LISTED_VALUE = 1.0
"""Most weight of such words where several things are asked for: a rare one, the new value. With two it is another."""

_LIST = 3
"""Passages to read from which on they are taken for a list."""

_LONG = 400
"""Characters from which on a message is taken to be text with a question."""

_MOST_TERMS = 24
"""Most terms of a message."""


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
    index: PassageIndex,
    terms: TermWeights,
    share_held: Callable[[int, int], float],
    budget: int,
    list_budget: int,
    count_tokens: Callable[[str], int],
    answer: Callable[[str], Passage | None],
) -> list[Candidate]:
    """The passages worth reading again before the reply to a message, best first, at most 12, with verdicts.

    `share_held` returns the share of the tokens of a range that the heads that copy still hold, 0 to 1; `budget`,
    `list_budget`, for messages that ask for several things, and `count_tokens` are in tokens. `answer` finds what the
    user said that answers a question in other words.
    """
    request = _request(message)
    asked = without_quantities(_weights(request, terms))
    if not asked or not len(index):
        return []
    passages = index.search(list(asked), _FOUND)
    if not label(message) and any(label(passage.text) for passage in passages):
        numbered = index.around(list(asked), _FOUND, AROUND)
        if (matches := said_by_people(asked, numbered, index.rarity, terms)) is not None:
            return _judge(matches, _Limits(_LISTED_VALUE, list_budget, list_budget, 0), terms, share_held, count_tokens)
    typed = _find_typed(asked, index, terms)
    others = set(passages) - typed
    matcher = Matcher(request, asked, terms, typed)
    matches, listed = matcher.with_listed_first(matcher.matches(_with_questions([*typed, *others], index)))
    if first_person(request) and is_question(request) and not any(match.rank >= 1 for match in matches):
        matches = _with_answer(answer(request), matches, len(asked))
    several = listed or asks_for_all(request)
    if several:
        limits = _Limits(_LISTED_VALUE, list_budget, list_budget, 0)
    else:
        limits = _Limits(_VALUE, budget, list_budget, budget // 2)
        for match in matches:
            match.rank /= 1 + match.rank if match.of_another else 1
        matches.sort(key=lambda match: match.of_another)
    return _judge(matches[:_SHOWN], limits, terms, share_held, count_tokens)


def states(text: str) -> str:
    """The first sentence of a text that is no question; empty if there is none."""
    return next((part for part in sentence_texts(text) if not is_request(part)), "")


def _with_answer(answer: Passage | None, matches: list[Match], terms: int) -> list[Match]:
    """The matches, after a passage that was not found by words."""
    if answer is None:
        return matches
    best = Match(answer, states(answer.text), True, numpy.zeros(terms, numpy.float32), 0.0, 1.0, ())
    return [best, *(match for match in matches if match.passage != answer)]


def _request(message: str) -> str:
    """The part of a message that asks: its questions, or its last sentence, if it is long."""
    if len(message) < _LONG:
        return message
    parts = sentence_texts(message)
    questions = [part for part in parts if is_question(part)]
    return " ".join(questions or parts[-1:])


def _weights(text: str, terms: TermWeights) -> dict[str, float]:
    """The informative words of a text, heaviest first, and what they weigh beyond a common word, 0 to 1."""
    weights = {word: (terms.weight(word) - COMMON) / (1 - COMMON) for word in words(text)}
    informative = sorted(((weight, word) for word, weight in weights.items() if weight > 0), reverse=True)
    return {word: weight for weight, word in informative[:_MOST_TERMS]}


def _find_typed(asked: dict[str, float], index: PassageIndex, terms: TermWeights) -> set[Passage]:
    """What the user told with a term or a related word in it."""
    related = terms.related(list(asked), _FOUND)
    others = [word for row in zip(*related.values(), strict=False) for word in row]
    return set(index.search([*asked, *others], 2 * _FOUND, typed=True))


def _with_questions(passages: list[Passage], index: PassageIndex) -> dict[Passage, Passage]:
    """The passages and the replies to the questions among them; each with the question, or with itself."""
    answers = {passage: passage for passage in passages}
    for passage in passages:
        if passage.role == "user" and is_question(passage.text):
            for reply in index.following(passage, 2):
                if reply.turn == passage.turn and reply.role == "assistant":
                    answers[reply] = passage
    return answers


def _rest(match: Match, other: Match, terms: TermWeights) -> float:
    """Weight of the words of a match that are neither in the other match nor what was asked for."""
    known = {*words(other.sentence), *match.terms}
    return sum(weight for word, weight in _weights(match.sentence, terms).items() if word not in known)


def _judge(
    matches: list[Match],
    limits: _Limits,
    terms: TermWeights,
    share_held: Callable[[int, int], float],
    count_tokens: Callable[[str], int],
) -> list[Candidate]:
    candidates: list[Candidate] = []
    best = max((match.rank for match in matches), default=0.0)
    user_answers = any(match.rank >= 1 and match.passage.role == "user" for match in matches)
    known: list[Match] = []
    budget_left = limits.budget
    for match in matches:
        passage = match.passage
        share = share_held(passage.start, passage.stop)
        text, size = excerpt(passage.text, match.sentence, min(budget_left, limits.room), count_tokens)
        if (name := label(passage.text)) and not text.startswith(name):
            text = name + text
            size = count_tokens(text)
        is_first = budget_left == limits.budget
        available = limits.most if is_first else budget_left
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
            agreement(newer, match) >= _REPLACED and _rest(match, newer, terms) <= limits.value for newer in known
        ):
            verdict = "outdated"
        elif share >= HELD:
            verdict = "still held"
        elif size > available:
            verdict = "no room"
        if verdict in ("recalled", "still held"):
            known.append(match)
        budget_left -= size if verdict == "recalled" else 0
        candidates.append(Candidate(passage, text, match.score, match.terms, share, size, verdict, match.sure))
    return _completed(candidates, budget_left)


def _completed(candidates: list[Candidate], budget_left: int) -> list[Candidate]:
    """The candidates; of several, those that are still held are read as well, for a reply repeats the list it reads."""
    if sum(candidate.verdict == "recalled" for candidate in candidates) < _LIST:
        return candidates
    completed = list[Candidate]()
    for candidate in candidates:
        read = candidate.verdict == "still held" and candidate.tokens <= budget_left
        budget_left -= candidate.tokens if read else 0
        completed.append(replace(candidate, verdict="recalled") if read else candidate)
    return completed
