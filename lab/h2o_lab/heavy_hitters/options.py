"""The options of ``h2o-compare heavy-hitters``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from h2o_stream.base.options import Option, numbers_if_any
from h2o_stream.compare.options import ComparisonOptions, Policies, Window, configs_of
from h2o_stream.config import DEFAULT_CHUNK, DEFAULT_WINDOW, CacheConfig
from h2o_stream.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class HeavyHittersOptions(ComparisonOptions):
    """The observations behind H2O: how sparse attention is, which tokens get it, how much of it each policy keeps.

    Also how it goes with the frequency of words, and what the text loses when heavy hitters, or as many random tokens,
    are removed. Writes tables and plots (extra "plots").
    """

    comparison = "h2o_lab.heavy_hitters.comparison:HeavyHitters"
    page = "h2o_lab.heavy_hitters.page:page"

    text: Annotated[Path, Option("A text file.")]
    policies: Policies = ("recent", "sink", "random", "h2o-paper", "h2o")
    window: Window = DEFAULT_WINDOW
    tokens: Annotated[int, Option("Tokens read, at most the model's context.", min=2)] = 2048
    remove: Annotated[
        Sequence[int],
        Option("Percentages of tokens to remove, separated by commas; may be empty.", parse=numbers_if_any),
    ] = (2, 10, 20)
    out: Annotated[Path, Option("Folder for the table and the plots.")] = Path("heavy-hitters")

    def __post_init__(self) -> None:
        super().__post_init__()
        for percent in self.remove:
            if not 1 <= percent <= 90:
                raise ConfigError(f"{percent} percent cannot be removed; --remove takes 1 to 90")

    @property
    def chunk(self) -> int:
        """Tokens between two evictions."""
        return self.cache.get("chunk") or DEFAULT_CHUNK

    @property
    def configs(self) -> list[CacheConfig]:
        """Every policy that evicts."""
        evicting = [policy for policy in self.policies if policy != "full"]
        if not evicting:
            raise ConfigError("--policies names none that evicts; give one or more")
        return configs_of(evicting, (self.window,), self.seeds, self.cache)
