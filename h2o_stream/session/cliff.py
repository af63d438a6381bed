"""A text that ends just before a model's context, so that what happens there can be watched at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from h2o_stream.base.resources import python_manual
from h2o_stream.engine.events import Finished, PrefillProgress
from h2o_stream.errors import ConfigError
from h2o_stream.session.conversation import Conversation

_BEFORE = 128
"""Tokens left before the context: enough for a question and the beginning of a reply."""

_REPLY = "I have read it."


@dataclass(frozen=True)
class Cliff:
    """A text to read first, and what it is for people."""

    text: str
    title: str

    @classmethod
    def of(cls, conversation: Conversation) -> Cliff:
        """The text for a conversation; raises ConfigError if the model has no context that a text could fill."""
        engine = conversation.engine
        if engine.context is None:
            raise ConfigError("this model has no trained context; leave out --cliff")
        count = engine.context - _BEFORE
        if count <= _BEFORE:
            raise ConfigError(f"the model's context is {engine.context} tokens; --cliff needs more than {2 * _BEFORE}")
        manual = python_manual()[: 16 * count]
        tokens = engine.tokenizer(manual, add_special_tokens=False)["input_ids"][:count]
        title = f"first {len(tokens):,} tokens of Python's manual are read, up to just before the context"
        return cls(engine.tokenizer.decode(tokens), f"{title} of {engine.context:,}")

    def read(self, conversation: Conversation) -> Iterator[PrefillProgress]:
        """Feed the text as a turn of the past."""
        for event in conversation.feed_turn(self.text, _REPLY):
            if isinstance(event, Finished):
                return
            yield event
