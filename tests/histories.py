"""Conversations with their histories, on tiny models, and what is said in them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from h2o_stream import CacheConfig, Conversation, Engine, SamplingConfig
from h2o_stream.session.history import ConversationHistory
from h2o_stream.session.transcript import Header
from h2o_stream.session.turn import Turn
from tests.small_talk import small_engine, small_model, small_tokenizer

Histories = Callable[..., ConversationHistory]

TALK = ["Tell me about the sea.", "And the tower?", "What about the light?", "Thanks, go on.", "And then?"]


def said(history: ConversationHistory, *texts: str) -> list[str]:
    """The replies to these messages."""
    return [next(event.text for event in history.say(text) if isinstance(event, Turn)) for text in texts]


@pytest.fixture
def make_history(talker: Any, tokenizer: PreTrainedTokenizerBase) -> Iterator[Histories]:
    """Makes histories of separate conversations with the same model, of which the last one has an engine."""
    model = talker()
    with ExitStack() as engines:

        def history(policy: str = "h2o", temperature: float = 0.0) -> ConversationHistory:
            engines.close()
            sampling = SamplingConfig(temperature=temperature, seed=5, max_tokens=10)
            engine = engines.enter_context(Engine(model, tokenizer, CacheConfig(policy, 64), sampling))
            return ConversationHistory(Conversation(engine, "Be brief."), Header("tiny", policy, 64, None))

        yield history


@pytest.fixture
def make_small() -> Iterator[Histories]:
    """The same with the small model."""
    model, tokenizer = small_model(), small_tokenizer()
    with ExitStack() as engines:

        def history(policy: str = "h2o", recall: Any = "off") -> ConversationHistory:
            engines.close()
            engine = engines.enter_context(small_engine(model, tokenizer, policy))
            return ConversationHistory(Conversation(engine, "w1 w2", recall=recall), Header("small", policy, 32, None))

        yield history
