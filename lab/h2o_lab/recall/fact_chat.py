"""Tells facts in a chat about other things, with the model's own replies, and asks for them at its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from h2o_lab.recall.asking import GREEDY, Answer, ask, say
from h2o_lab.recall.facts import Fact, never_said, questions_about
from h2o_stream.session.conversation import Conversation
from h2o_stream.session.messages import UserTurn, text_of
from h2o_stream.session.questions import Question

_MAX_REPLY = 64
"""Tokens of a reply in the chat; with MT-Bench's 160 turns, the chat has more than 20,000 tokens before it repeats."""


@dataclass(frozen=True)
class OtherTurn:
    """A turn about other things; the first one of its question refers to nothing before.

    `recalling` says whether evicted passages were read again before the reply.
    """

    question_id: int | str
    first: bool
    recalling: bool


class FactChat:
    """A new conversation of `length` tokens in which the facts are told at even intervals, between endless prompts.

    Attributes:
        turns: those about other things.
    """

    def __init__(
        self,
        conversation: Conversation,
        facts: Sequence[Fact],
        prompts: Iterator[tuple[Question, UserTurn]],
        length: int,
    ) -> None:
        self._conversation, self._facts, self._prompts, self._length = conversation, facts, prompts, length
        self._ends: dict[str, int] = {}
        self.turns: list[OtherTurn] = []

    @property
    def _seen(self) -> int:
        return len(self._conversation.engine.tokens)

    def talk(self) -> Iterator[int]:
        """Say everything. Yields the tokens so far, after each turn."""
        engine = self._conversation.engine
        engine.set_sampling(replace(GREEDY, max_tokens=_MAX_REPLY))
        interval = self._length / (len(self._facts) + 1)
        for number, fact in enumerate(self._facts, 1):
            yield from self._talk_until(interval * number)
            say(self._conversation, fact.statement)
            self._ends[fact.id] = self._seen
            yield self._seen
        yield from self._talk_until(self._length)
        engine.set_sampling(GREEDY)

    def _talk_until(self, tokens: float) -> Iterator[int]:
        while self._seen < tokens:
            question, turn = next(self._prompts)
            _, recalling = say(self._conversation, text_of(turn))
            self.turns.append(OtherTurn(question.id, turn == question.turns[0], recalling))
            yield self._seen

    def ask(self) -> Iterator[Answer]:
        """Ask for every fact in the same and in other words, and for what was never said."""
        questions = [question for fact in self._facts for question in questions_about(fact)]
        questions += never_said(self._facts)
        last = max(self._ends.values())
        yield from ask(
            self._conversation,
            [(question, self._seen - self._ends.get(question.id, last)) for question in questions],
        )
