"""Conversations that are saved and resumed: the next reply is the same as without the break."""

from collections.abc import Callable

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from h2o_stream import CacheConfig, ConfigError, Conversation, Engine, H2OStreamError, SamplingConfig
from h2o_stream.session.turn import Turn
from tests.states import equal_states

TALK = ["Tell me about the sea.", "And the tower?", "What about the light?", "Thanks, go on."]
Talker = Callable[..., PreTrainedModel]


def engine(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, policy: str = "h2o") -> Engine:
    return Engine(model, tokenizer, CacheConfig(policy, 64), SamplingConfig(temperature=1.0, seed=3, max_tokens=10))


def said(conversation: Conversation, text: str) -> str:
    return next(event.text for event in conversation.say(text) if isinstance(event, Turn))


def test_a_state_that_does_not_fit_changes_nothing(talker: Talker, tokenizer: PreTrainedTokenizerBase) -> None:
    model = talker()
    with engine(model, tokenizer, "sink") as one:
        talk = Conversation(one)
        said(talk, TALK[0])
        foreign = talk.state_dict()
    with engine(model, tokenizer) as other:
        again = Conversation(other)
        said(again, TALK[1])
        before = again.state_dict()
        with pytest.raises(H2OStreamError, match="another policy"):
            again.load_state_dict(foreign)
        with pytest.raises(H2OStreamError, match="damaged"):
            again.load_state_dict({name: tensor for name, tensor in before.items() if name != "conversation"})
        after = again.state_dict()
        assert equal_states(before, after)


def test_another_system_prompt(talker: Talker, tokenizer: PreTrainedTokenizerBase) -> None:
    with engine(talker(), tokenizer) as one:
        talk = Conversation(one, "Be brief.")
        said(talk, TALK[0])
        before = talk.state_dict()
        with pytest.raises(ConfigError, match="pinned tokens"):
            talk.reset("word " * 8000)
        after = talk.state_dict()
        assert equal_states(before, after)
        talk.reset("Be kind.")
        said(talk, TALK[1])
        start = tokenizer.decode(list(one.tokens[: one.counts.pinned + one.counts.sinks]))
        assert "Be kind." in start
        assert "Be brief." not in tokenizer.decode(list(one.tokens))
