"""Asks the questions of an item in a conversation, under eviction. It goes on with the right answers.

So every policy, and a cache that never saw the context, has the same earlier turns. With the model's own replies in
their place, margins would also measure how a policy keeps, and a small model repeats, what was said before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from h2o_lab.recall.asking import prefilled, tell, widest
from h2o_lab.ruler.items import Item, Question
from h2o_stream.cache.state import State
from h2o_stream.config import RecallMode, SamplingConfig
from h2o_stream.engine.engine import Engine
from h2o_stream.engine.events import Finished, Token
from h2o_stream.engine.text import shared_length
from h2o_stream.errors import H2OStreamError
from h2o_stream.session.conversation import Conversation

READ = "I have read it."
"""The reply to a context that no question follows at once."""

_ROOM = 8
"""Tokens that a reply may have beyond twice the longest answer."""


@dataclass(frozen=True)
class Answer:
    """The answer to a question.

    Attributes:
        question: its number in the item, from 0.
        score: see `Question.score`.
        margin: log-probability of the right answer minus that of the likeliest distractor, in nats.
        reply: the text.
        recall: its mode.
        recalling: whether evicted passages were read again before the reply.
    """

    question: int
    score: float
    margin: float
    reply: str
    recall: RecallMode
    recalling: bool


def ask_at_once(conversation: Conversation, item: Item) -> Iterator[Answer]:
    """Ask the only question of an item in one message with the context."""
    (question,) = item.questions
    yield _ask(conversation, 0, f"{item.context}\n\n{question.text}", question)


def ask_in_turns(conversation: Conversation, item: Item, modes: Sequence[RecallMode] = ("off",)) -> Iterator[Answer]:
    """Feed the context once, then ask one question after another in each mode of recall."""
    conversation.recall.mode = widest(modes)
    tell(conversation, item.context, READ)
    state = conversation.state_dict()
    for mode in modes:
        conversation.load_state_dict(state)
        conversation.recall.mode = mode
        yield from ask_without_context(conversation, item)


def ask_without_context(conversation: Conversation, item: Item) -> Iterator[Answer]:
    """Ask one question after another."""
    for number, question in enumerate(item.questions):
        yield _ask(conversation, number, question.text, question)


def _ask(conversation: Conversation, number: int, message: str, question: Question) -> Answer:
    """Feed a message and the beginning of the reply, take the margin and the model's reply, then feed the right answer.

    What follows the beginning of the reply is taken back each time.
    """
    engine = conversation.engine
    prefix, answers = _encode(engine, question)
    with prefilled(conversation, message) as recalling:
        _feed(engine, prefix[:-1])
        state = engine.state_dict()
        losses = []
        for answer in answers:
            losses.append(float(engine.served.losses([prefix[-1], *answer[:-1]], answer).sum()))
            _return_to(conversation, state)
        _feed(engine, prefix[-1:])
        engine.set_sampling(SamplingConfig(0.0, max_tokens=2 * max(map(len, answers)) + _ROOM))
        reply = "".join(event.text for event in engine.decode() if isinstance(event, Token | Finished))
        _return_to(conversation, state)
        _feed(engine, [prefix[-1], *answers[0]])
    mode = conversation.recall.mode
    margin = min(losses[1:]) - losses[0]
    return Answer(number, question.score(reply), margin, reply.strip(), mode, recalling)


def _return_to(conversation: Conversation, state: State) -> None:
    """Take back what the engine was fed since. The turn goes on."""
    conversation.engine.load_state_dict(state)
    number = conversation.engine.cache.stream_number
    conversation.metadata = replace(conversation.metadata, stream=number)


def _encode(engine: Engine, question: Question) -> tuple[list[int], list[list[int]]]:
    """Token ids of the beginning of the reply, and of the right answer and the distractors after it.

    A tokenizer may merge the end of the beginning with the answer; such tokens belong to the answers.
    """

    def encode(text: str) -> list[int]:
        return list(engine.tokenizer(text, add_special_tokens=False)["input_ids"])

    prefix = encode(question.prefix)
    replies = [encode(f"{question.prefix} {', '.join(a)}") for a in (question.answers, *question.distractors)]
    shared = min(shared_length(prefix, reply) for reply in replies)
    return prefix[:shared], [reply[shared:] for reply in replies]


def _feed(engine: Engine, tokens: Sequence[int]) -> None:
    for event in engine.prefill(tokens):
        if isinstance(event, Finished):
            raise H2OStreamError(f"the stream ended early: {event.detail or event.reason}")
