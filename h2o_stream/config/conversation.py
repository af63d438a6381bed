"""A conversation, what is recalled in it, and the command that holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from h2o_stream.config.cache import CacheConfig
from h2o_stream.config.model import ModelConfig
from h2o_stream.config.sampling import SamplingConfig
from h2o_stream.config.speculation import SpeculateMode
from h2o_stream.errors import ConfigError

RecallMode = Literal["auto", "wide", "off"]

CHAT_RECALL: RecallMode = "auto"
"""The mode of recall in ``h2o-chat``. Elsewhere it is that of `RecallConfig`."""


@dataclass(frozen=True)
class RecallConfig:
    """Whether evicted passages are read again before a reply, and how many.

    Args:
        mode: ``auto`` searches for the words of every message, ``wide`` also for what answers questions about the user
            in other words, by a head of the model; ``off`` never does.
        budget: most tokens to read again in a turn, of a list twice as many; None is a quarter of the window.
    """

    mode: RecallMode = "off"
    budget: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(RecallMode):
            raise ConfigError(f"recall is {self.mode!r}; --recall takes {' or '.join(get_args(RecallMode))}")
        if self.budget is not None and self.budget < 1:
            raise ConfigError(f"the budget of recall is {self.budget} tokens; it must be at least 1")


AtContext = Literal["continue", "stop"]
EngineChoice = Literal["auto", "eager"]
ThinkMode = Literal["show", "fold", "hide", "off"]

THINKING_VARIABLES: Mapping[str, tuple[bool | int, bool | int]] = {
    **dict.fromkeys(("enable_thinking", "thinking", "reasoning"), (True, False)),
    "thinking_budget": (-1, 0),  # tokens; Seed-OSS
}
"""Variables by which chat templates let thinking be switched, with their values for on and off."""

EFFORT_VARIABLE = "reasoning_effort"
"""Variable of chat templates for how much a model is to think: low, medium or high."""

THINKING_WORDS = (("/think", "/no_think"), ("/think", "/nothink"))
"""Words in messages that templates without such a variable look for, for on and off."""


@dataclass(frozen=True)
class Settings:
    """All settings of a conversation.

    Args:
        system: the system prompt; None is the default of the model's template.
        at_context: whether a cache with absolute positions continues past the model's context or stops there.
        engine: ``auto`` runs the native step where it serves the model, ``eager`` runs transformers' forward.
        recall: whether evicted passages are read again.
        speculate: ``auto`` guesses tokens from what was said before, where that is faster; ``off`` never does.
        think: how thinking is drawn: ``show`` all of it, ``fold`` it to a line, or ``hide`` it; ``off`` switches it off
            where the model's template can, and is ``fold`` elsewhere.
        tools: JSON schemas of tools that the chat template describes.
        json_schema: what every reply must be, as a JSON schema; None for any text. Thinking before it is free.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    system: str | None = None
    at_context: AtContext = "continue"
    engine: EngineChoice = "auto"
    recall: RecallConfig = field(default_factory=RecallConfig)
    speculate: SpeculateMode = "auto"
    think: ThinkMode = "fold"
    tools: tuple[Mapping[str, Any], ...] = ()
    json_schema: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.engine not in get_args(EngineChoice):
            raise ConfigError(f"engine is {self.engine!r}; --engine takes {', '.join(get_args(EngineChoice))}")
        if self.speculate not in get_args(SpeculateMode):
            raise ConfigError(f"speculate is {self.speculate!r}; --speculate takes auto or off")
        if self.think not in get_args(ThinkMode):
            raise ConfigError(f"think is {self.think!r}; --think takes {', '.join(get_args(ThinkMode))}")


AUTOMATIC_BYTES = 2**30
"""How much of the disk the chats take that the user did not name; the oldest make room for the newest."""


@dataclass(frozen=True)
class ChatConfig:
    """Settings of ``h2o-chat``, as its ``--help`` explains them. Without a prompt it reads messages.

    The prompt asks about the text that was piped. A session keeps the options that are named `kept_options`. Without a
    history nothing is kept but a session that was asked for.
    """

    prompt: str | None = None
    piped: str = ""
    single_turn: bool = False
    session: str | None = None
    server: str | None = None
    kept_options: frozenset[str] = frozenset()
    retell: bool = False
    plain: bool = False
    vim: bool = False
    history: bool = True
    record: Path | None = None
