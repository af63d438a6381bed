"""Facts that a user might tell in a chat, and questions about them; our own set in data/recall."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from h2o_stream.base.resources import project_file
from h2o_stream.errors import ConfigError
from h2o_stream.session.jsonl import read_objects

Kind = Literal["same", "other", "contradicted", "never"]
"""How a question asks: in the words of the fact, in other words, for a fact that was updated, for something never said.
"""

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Fact:
    """A fact that the user tells.

    Attributes:
        id: names it in the replies of a folder.
        statement: the user's message.
        same: a question in the words of the statement.
        other: the same question without them.
        reply: the beginning of a reply, up to the answer.
        answers: the answer, and other ways to write it.
        update: a later message that gives another answer.
        updated: the answer after it, and other ways to write it.
    """

    id: str
    statement: str
    same: str
    other: str
    reply: str
    answers: tuple[str, ...]
    update: str
    updated: tuple[str, ...]


_LISTS = ("answers", "updated")


@dataclass(frozen=True)
class Question:
    """A question, and which values a reply must and must not tell.

    The id is the fact's, or for something never said a number; `reply` is the beginning of a reply, up to the answer.
    `answers` has the right value in all its spellings, if there is one, `wrong` the fact's other value, or for
    something never said the values of all facts.
    """

    kind: Kind
    id: str
    text: str
    reply: str
    answers: tuple[str, ...]
    wrong: tuple[str, ...]

    def right(self, reply: str) -> bool:
        """Whether a reply tells the right value, if there is one, and no wrong one."""
        return (not self.answers or tells(reply, self.answers)) and not tells(reply, self.wrong)


def tells(reply: str, values: Sequence[str]) -> bool:
    """Whether a reply has one of these values as whole words; a number does not match a part of a longer one."""
    text = reply.casefold()
    return any(
        re.search(rf"(?<!\w)(?<!\d[.,:]){re.escape(value.casefold())}(?!\w)(?![.,:]\d)", text) for value in values
    )


def read_facts(count: int) -> tuple[Fact, ...]:
    """The first facts of our set; raises ConfigError if there are fewer."""
    records = [record for _, record in read_objects(project_file("data/recall/facts.jsonl"), "facts")]
    if count > len(records):
        raise ConfigError(f"facts is {count}, there are {len(records)}; lower --facts")
    return tuple(Fact(**{**record, **{name: tuple(record[name]) for name in _LISTS}}) for record in records[:count])


def questions_about(fact: Fact) -> tuple[Question, Question]:
    """The questions about a fact that was not updated: in the same and in other words."""
    rest = (fact.reply, fact.answers, fact.updated)
    return Question("same", fact.id, fact.same, *rest), Question("other", fact.id, fact.other, *rest)


def question_after_update(fact: Fact) -> Question:
    """The question about a fact that was updated; the older value is wrong."""
    return Question("contradicted", fact.id, fact.same, fact.reply, fact.updated, fact.answers)


def never_said(facts: Sequence[Fact]) -> tuple[Question, ...]:
    """Questions close to facts but about something never said: half as many as facts, rounded up."""
    file = project_file("data/recall/never_said.jsonl")
    texts = [record["question"] for _, record in read_objects(file, "questions")]
    planted = tuple(value for fact in facts for value in fact.answers)
    return tuple(
        Question("never", str(number), text, "", (), planted)
        for number, text in enumerate(texts[: -(-len(facts) // 2)], 1)
    )
