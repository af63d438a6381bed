"""The options of ``h2o-compare soak``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from h2o_stream.base.options import Option
from h2o_stream.compare.options import ComparisonOptions, Window, configs_of
from h2o_stream.config import DEFAULT_POLICY, DEFAULT_WINDOW, CacheConfig, EngineChoice
from h2o_stream.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SoakOptions(ComparisonOptions):
    """One very long stream: memory, speed, loss and the cache's invariants from its beginning to its end.

    Every turn is a piece of text and a sampled reply. The text is read several times, so that a drift of its loss would
    show. --model tiny is a random model of two layers, for streams of millions of tokens.
    """

    comparison = "h2o_lab.soak.comparison:Soak"
    page = "h2o_lab.soak.page:page"

    text: Annotated[Path | None, Option("A file. (default: the manual of Python)")] = None
    tokens: Annotated[int, Option("Length of the stream.", min=20_000)] = 200_000
    passes: Annotated[int, Option("Times the text is read.", min=2)] = 10
    policy: Annotated[str, Option("Any that evicts.")] = DEFAULT_POLICY
    window: Window = DEFAULT_WINDOW
    engine: EngineChoice = "auto"

    @property
    def configs(self) -> list[CacheConfig]:
        """The one."""
        if self.policy == "full":
            raise ConfigError("--policy full keeps everything, which no memory holds forever; give one that evicts")
        return configs_of((self.policy,), (self.window,), self.seeds, self.cache)
