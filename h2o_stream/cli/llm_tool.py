"""The model ``h2o`` of the command-line tool ``llm``: ``llm -m h2o "Hello"``, ``llm chat -m h2o``.

Without a server: the model is loaded by the process of ``llm``. A chat keeps its cache between turns; a conversation
that a new process continues is read again through the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import llm
from pydantic import Field

from h2o_stream.config import (
    CHAT_RECALL,
    DEFAULT_MODEL,
    CacheConfig,
    ModelConfig,
    SamplingConfig,
)
from h2o_stream.errors import H2OStreamError


class H2OOptions(llm.Options):
    """What ``-o NAME VALUE`` sets, as the options of ``h2o-chat``."""

    model: str = Field(DEFAULT_MODEL, description="As for h2o-chat -m: a Hub id, a folder, a .gguf file")
    window: int | None = Field(None, description="Tokens kept per layer and KV head")
    policy: str = Field(CacheConfig.policy, description="Which tokens are kept")
    temperature: float | None = Field(None, description="0 is greedy; the model's own by default")
    top_p: float | None = Field(None, description="Nucleus mass")
    seed: int | None = Field(None, description="Random seed")
    max_tokens: int = Field(SamplingConfig.max_tokens, description="Maximum tokens of a reply")


@dataclass
class _Open:
    """A conversation in memory: the tool's object, with its settings, ours, and how many turns both have."""

    theirs: Any
    settings: tuple[Any, ...]
    ours: Any
    turns: int


class H2OModel(llm.Model):
    """The model as llm runs it."""

    model_id = "h2o"
    can_stream = True
    supports_schema = True
    Options = H2OOptions

    def __init__(self) -> None:
        self._loaded: tuple[tuple[Any, ...], Any] | None = None
        self._open: _Open | None = None

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Iterator[str]:
        """Yield a reply, and continue the conversation if it has one; raises llm.ModelError for our own errors."""
        try:
            opened = self._continued(prompt, conversation)
            yield from self._reply(opened, prompt, response)
        except H2OStreamError as error:
            raise llm.ModelError(str(error)) from error

    def _continued(self, prompt: Any, conversation: Any) -> _Open:
        from h2o_stream.engine.engine import Engine
        from h2o_stream.session.conversation import Conversation

        past = list(conversation.responses) if conversation else []
        options = prompt.options
        system = (
            next((response.prompt.system for response in past if response.prompt.system), None) or prompt.system or None
        )
        settings = (options.model, options.window, options.policy, system)
        opened = self._open
        if (
            opened
            and past
            and opened.theirs is conversation
            and (opened.settings, opened.turns) == (settings, len(past))
        ):
            return opened
        if self._open:
            self._open.ours.engine.close()
            self._open = None
        cache = CacheConfig(policy=options.policy, **({} if options.window is None else {"window": options.window}))
        model = self._load(ModelConfig(options.model), cache)
        engine = Engine(model.model, model.tokenizer, cache, sampling_defaults=model.sampling)
        ours = Conversation(engine, system or model.system, model.stops, CHAT_RECALL)
        for response in past:
            for _ in ours.feed_turn(response.prompt.prompt, response.text()):
                pass
        self._open = _Open(conversation, settings, ours, len(past))
        return self._open

    def _load(self, config: ModelConfig, cache: CacheConfig) -> Any:
        from h2o_stream.base.progress import ignore
        from h2o_stream.loading.loading import load_model

        key = (config, cache)
        if self._loaded is None or self._loaded[0] != key:
            loaded = load_model(config, cache, "auto", ignore, ignore)
            self._loaded = key, loaded
        return self._loaded[1]

    def _reply(self, opened: _Open, prompt: Any, response: Any) -> Iterator[str]:
        from h2o_stream.engine.events import Token
        from h2o_stream.session.turn import Turn

        options, engine = prompt.options, opened.ours.engine
        engine.set_sampling(
            SamplingConfig(
                temperature=options.temperature,
                top_p=options.top_p,
                seed=options.seed,
                max_tokens=options.max_tokens,
            ),
            reseed=options.seed is not None,
        )
        opened.ours.follow(prompt.schema or None)
        text = ""
        with closing(opened.ours.say(prompt.prompt)) as events:
            for event in events:
                if isinstance(event, Token):
                    text += event.text
                    yield event.text
                elif isinstance(event, Turn):
                    yield event.text[len(text) :]
                    response.set_usage(input=event.timings.prompt_tokens, output=event.timings.new_tokens)
        opened.turns += 1


register_models = llm.hookimpl(lambda register: register(H2OModel()))
"""The door by which ``llm`` finds the model."""
