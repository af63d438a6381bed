"""Tells facts in a chat with other talk between them, and asks for each at set distances."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, count
from typing import Any

from h2o_lab.recall.asking import MAX_ANSWER, Answer, ask, length_of_turn, tell
from h2o_lab.recall.facts import Fact, Question, never_said, question_after_update, questions_about
from h2o_stream.session.conversation import Conversation

ACKNOWLEDGEMENT = "Thank you, I will remember that."
"""The reply to a fact."""

SPACING = 192
"""Tokens from one fact to the next. All powers of four from 64 on leave the rest 64, so that the questions at those
distances come together, between two facts.
"""

_GREETING = ("Hello!", "Hello! How can I help you today?")
_REPLY = 12
"""Tokens of text in a reply of other talk."""

_PIECE = 256
"""Tokens of a turn of other talk, at most half as many more."""

_MIN_PIECE = 4
"""Tokens of text in a message of other talk, at least."""


@dataclass(frozen=True)
class Telling:
    """A message with a fact, and the questions asked at every distance after it.

    Its turn ends `at` tokens after the end of the first one's.
    """

    text: str
    at: int
    questions: tuple[Question, ...] = ()


def facts_told_once(facts: Sequence[Fact]) -> list[Telling]:
    """Each fact, `SPACING` tokens apart. After the last one it is also asked for what was never said."""
    tellings = [Telling(fact.statement, SPACING * n, questions_about(fact)) for n, fact in enumerate(facts)]
    last = tellings.pop()
    return [*tellings, Telling(last.text, last.at, (*last.questions, *never_said(facts)))]


def facts_with_updates(facts: Sequence[Fact]) -> list[Telling]:
    """Each fact, and two facts later its update, which is asked for."""
    offset = SPACING * 2 // 3
    statements = [Telling(fact.statement, SPACING * (n - 2) + offset) for n, fact in enumerate(facts)]
    updates = [Telling(fact.update, SPACING * n, (question_after_update(fact),)) for n, fact in enumerate(facts)]
    return sorted([*statements, *updates], key=lambda telling: telling.at)


class Filler:
    """Other talk without an end: the tokens of a text, repeated.

    A reply goes on with the text, because a small model imitates short replies that it has seen several times: of nine
    facts, each asked for 64 tokens later, the embedded model with a full cache told 5; it told 2 if the replies were
    sixteen phrases in turn ("That makes sense to me."), and 0 if they were always the same one.
    """

    def __init__(self, tokenizer: Any, tokens: Sequence[int]) -> None:
        self._tokenizer, self._tokens, self._next = tokenizer, tokens, 0

    def shortest(self, conversation: Conversation) -> int:
        """Tokens of its shortest turn, about."""
        return length_of_turn(conversation, "", "") + _MIN_PIECE + _REPLY

    def tell(self, conversation: Conversation, length: int) -> None:
        """Feed a turn of at least this length, and at most a few tokens above it or above the shortest one."""
        tokens = max(length - length_of_turn(conversation, "", "") - _REPLY, _MIN_PIECE)
        while length_of_turn(conversation, *(turn := self._turn(tokens))) < length:
            tokens += 1  # the text of some tokens can have fewer
        self._next += tokens + _REPLY
        tell(conversation, *turn)

    def _turn(self, tokens: int) -> tuple[str, str]:
        middle = self._next + tokens
        return self._text(self._next, middle), self._text(middle, middle + _REPLY)

    def _text(self, start: int, stop: int) -> str:
        tokens = [self._tokens[index % len(self._tokens)] for index in range(start, stop)]
        text: str = self._tokenizer.decode(tokens)
        return text.replace("\ufffd", "").strip()


@dataclass(frozen=True, order=True)
class _Due:
    """A question that waits for the token index `at`; `number` orders those of one time. The fact's turn ended at
    `end`.
    """

    at: int
    number: int
    distance: int
    end: int
    question: Question


class FactStream:
    """A new conversation in which facts are told, and asked for at each distance from the end of their turn.

    What would end beyond `limit` tokens is left out; None sets no limit. `known` has the fields of the first answers,
    which are not asked for again.
    """

    def __init__(
        self,
        conversation: Conversation,
        tellings: Sequence[Telling],
        distances: Sequence[int],
        filler: Filler,
        limit: int | None = None,
        known: deque[dict[str, Any]] | None = None,
    ) -> None:
        self._known = known if known is not None else deque()
        self._conversation, self._distances, self._filler, self._limit = conversation, distances, filler, limit
        self._tellings, self._due = deque(tellings), list[_Due]()
        self._numbers, self._origin = count(), 0

    def run(self) -> Iterator[int | tuple[int, Answer]]:
        """Tell and ask everything. Yields the tokens so far after each turn, and each answer after its distance."""
        tell(self._conversation, *_GREETING)
        self._origin = self._seen + self._length(self._tellings[0].text, ACKNOWLEDGEMENT) - self._tellings[0].at
        while self._more():
            until_telling, until_due = self._until_telling(), self._due[0].at - self._seen if self._due else math.inf
            if until_due <= 0:
                yield from self._ask()
            elif until_telling < self._filler.shortest(self._conversation):
                self._tell()
            else:
                length = min(until_telling, until_due)
                self._filler.tell(self._conversation, int(length) if length <= 1.5 * _PIECE else _PIECE)
            yield self._seen

    @property
    def _seen(self) -> int:
        return len(self._conversation.engine.tokens)

    def _length(self, text: str, reply: str) -> int:
        return length_of_turn(self._conversation, text, reply)

    def _fits(self, stop: int) -> bool:
        return self._limit is None or stop <= self._limit

    def _more(self) -> bool:
        if self._tellings and not self._fits(self._origin + self._tellings[0].at):
            self._tellings.clear()
        return bool(self._tellings or self._due)

    def _until_telling(self) -> float:
        """Tokens until the next fact's turn begins; infinite if there is none."""
        if not self._tellings:
            return math.inf
        telling = self._tellings[0]
        return self._origin + telling.at - self._length(telling.text, ACKNOWLEDGEMENT) - self._seen

    def _tell(self) -> None:
        telling = self._tellings.popleft()
        tell(self._conversation, telling.text, ACKNOWLEDGEMENT)
        end = self._seen
        for distance in self._distances:
            for question in telling.questions:
                if self._fits(end + distance + self._length(question.text, question.reply) + MAX_ANSWER):
                    heappush(self._due, _Due(end + distance, next(self._numbers), distance, end, question))

    def _ask(self) -> Iterator[tuple[int, Answer]]:
        due = list[_Due]()
        while self._due and self._due[0].at <= self._seen:
            due.append(heappop(self._due))
        known = [_answer_of(self._known.popleft()) for _ in due[: len(self._known)]]
        unknown = due[len(known) :]
        answers = chain(known, ask(self._conversation, [(item.question, self._seen - item.end) for item in unknown]))
        yield from ((item.distance, answer) for item, answer in zip(due, answers, strict=True))


def _answer_of(fields: dict[str, Any]) -> Answer:
    return Answer(**{name: value for name, value in fields.items() if name != "distance"})
