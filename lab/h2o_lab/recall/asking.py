"""Asks questions in a conversation and leaves it as it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from h2o_lab.recall.facts import Question, tells
from h2o_stream.config import RecallMode, SamplingConfig
from h2o_stream.engine.events import Finished, PrefillProgress, Token
from h2o_stream.engine.text import shared_length
from h2o_stream.errors import H2OStreamError
from h2o_stream.recall.passage import Recalled
from h2o_stream.session.conversation import Conversation
from h2o_stream.session.turn import Turn

MAX_ANSWER = 40
"""Tokens of a reply to a question."""

GREEDY = SamplingConfig(temperature=0.0, max_tokens=MAX_ANSWER)


@dataclass(frozen=True)
class Answer:
    """The reply to a `Question`, asked `tokens` after the end of the fact's turn, or after the last fact if it asks for
    none.

    A right reply tells the right value and no wrong one. `margin` is the log-probability of the right value minus that
    of the wrong one in nats, where the two first differ, if the reply began with `Question.reply`; None without a right
    value. `recalling` says whether evicted passages were read again before the reply.
    """

    kind: str
    id: str
    tokens: int
    reply: str
    right: bool
    wrong: bool
    margin: float | None
    recalling: bool


def tell(conversation: Conversation, text: str, reply: str) -> None:
    """Feed a turn.

    Raises:
        H2OStreamError: it could not be fed completely.
    """
    for _ in read(conversation, text, reply):
        pass


def read(conversation: Conversation, text: str, reply: str) -> Iterator[int]:
    """Feed a turn, and yield the tokens of it that are fed; raises H2OStreamError if it could not be fed completely."""
    for event in conversation.feed_turn(text, reply):
        if isinstance(event, Finished):
            raise H2OStreamError(f"the stream ended early: {event.detail or event.reason}")
        yield event.done


def widest(modes: Iterable[RecallMode]) -> RecallMode:
    """The mode of recall that keeps what any of these needs."""
    order: tuple[RecallMode, ...] = ("off", "auto", "wide")
    return max(modes, key=order.index)


def length_of_turn(conversation: Conversation, text: str, reply: str) -> int:
    """Tokens that a turn would add."""
    template, tokens = conversation.metadata.template, conversation.engine.tokens
    ended = bool(tokens) and tokens[-1] in conversation.engine.end_tokens
    prompt = template.next_turn(text, ended)
    return len(prompt.tokens) + len(template.reply(reply, prompt.num_thinking is not None))


def say(conversation: Conversation, text: str) -> tuple[str, bool]:
    """The reply to a message, and whether evicted passages were read again before it."""
    pieces, recalling = list[str](), False
    for event in conversation.say(text):
        if isinstance(event, Token):
            pieces.append(event.text)
        recalling = recalling or _reads_again(event)
    return "".join(pieces).strip(), recalling


def _reads_again(event: object) -> bool:
    """Whether passages are read again, not only found without room for them."""
    return isinstance(event, Recalled) and bool(event.candidates)


def ask(conversation: Conversation, questions: Iterable[tuple[Question, int]]) -> Iterator[Answer]:
    """Ask each question, given with `Answer.tokens`, on its own. After the last one the conversation is as before."""
    state = conversation.state_dict()
    for question, tokens in questions:
        margin = _margin(conversation, question) if question.answers else None
        if margin is not None:
            conversation.load_state_dict(state)
        reply, recalling = say(conversation, question.text)
        conversation.load_state_dict(state)
        right, wrong = question.right(reply), tells(reply, question.wrong)
        yield Answer(question.kind, question.id, tokens, reply, right, wrong, margin, recalling)


def _margin(conversation: Conversation, question: Question) -> float:
    """See `Answer.margin`. Leaves the conversation with half a reply, which it does not know of."""
    tokenizer = conversation.engine.tokenizer
    right, wrong = (_encode(tokenizer, question.reply, values) for values in (question.answers, question.wrong))
    shared = shared_length(right, wrong)
    with prefilled(conversation, question.text):
        logits = conversation.engine.served.forward(right[:shared])
    return float(logits[right[shared]] - logits[wrong[shared]])


@contextmanager
def prefilled(conversation: Conversation, text: str) -> Iterator[bool]:
    """A block in which a message is fed as far as the reply, and its turn goes on: what is read again stays.

    The value says whether evicted passages are read again. Raises H2OStreamError if it could not be fed completely.
    """
    recalling = False
    with closing(conversation.say(text)) as events:
        for event in events:
            recalling = recalling or _reads_again(event)
            if isinstance(event, PrefillProgress) and event.done == event.total:
                break
            if isinstance(event, Turn):
                raise H2OStreamError(f"the stream ended early: {event.detail or event.finish}")
        yield recalling


def _encode(tokenizer: Any, reply: str, values: Sequence[str]) -> list[int]:
    """A reply with a value; its full stop makes it differ from one with a longer value."""
    return list(tokenizer(f"{reply} {values[0]}.", add_special_tokens=False)["input_ids"])
