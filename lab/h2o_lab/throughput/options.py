"""The options of ``h2o-compare throughput``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from h2o_stream.base.options import Option, listed, parse_bytes
from h2o_stream.compare.options import ComparisonOptions, InAll, Policies, configs_of
from h2o_stream.config import CacheConfig, EngineChoice
from h2o_stream.errors import ConfigError


@dataclass(frozen=True)
class Shape:
    """A request: the tokens of its prompt, and the tokens generated."""

    prompt: int
    new: int

    def __str__(self) -> str:
        return f"{self.prompt}+{self.new}"

    @property
    def length(self) -> int:
        """All its tokens."""
        return self.prompt + self.new


def _shapes(text: str, flag: str) -> tuple[Shape, ...]:
    return tuple(_shape(item, flag) for item in listed(text, flag))


def _shape(text: str, flag: str) -> Shape:
    prompt, _, new = text.partition("+")
    if not (prompt.isdecimal() and new.isdecimal() and int(prompt) and int(new)):
        raise ConfigError(f"{text!r} is not a shape; {flag} takes prompt and generated tokens like 512+32")
    return Shape(int(prompt), int(new))


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(ComparisonOptions):
    """Generated tokens/s of whole batches, prompts included, the largest that fit into the same memory for the cache.

    transformers' own full cache always runs; the policies are timed at its batch size, too.
    """

    comparison = "h2o_lab.throughput.comparison:Throughput"
    page = "h2o_lab.throughput.page:page"
    in_all = InAll(
        quick={"shapes": (Shape(128, 128),), "cache_budget": "auto"},
        thorough={"shapes": (Shape(512, 32), Shape(512, 512)), "cache_budget": "auto"},
    )

    text: Annotated[Path, Option("A text file, which prompts are cut from.")]
    policies: Policies = ("recent", "h2o")
    shapes: Annotated[
        Sequence[Shape], Option("Tokens of prompt + tokens generated, separated by commas.", parse=_shapes)
    ] = (Shape(512, 32), Shape(512, 512), Shape(512, 1024))
    ratio: Annotated[float, Option("Window, as a fraction of prompt and generated tokens.", min=0, max=1)] = 0.2
    cache_budget: Annotated[
        str, Option("Memory for the cache of a batch: 128MiB, 2GiB; auto: of five rows of a full cache.")
    ] = "2GiB"
    rounds: Annotated[int, Option("Times each batch is generated; the median is reported.", min=1)] = 1
    engine: EngineChoice = "auto"

    def __post_init__(self) -> None:
        _ = self.budget
        for config in self.configs:
            config.plan()

    @property
    def budget(self) -> int | None:
        """Bytes for the cache of a batch; None for ``auto``."""
        return None if self.cache_budget == "auto" else parse_bytes(self.cache_budget, "--cache-budget")

    @property
    def configs(self) -> list[CacheConfig]:
        """Those of all shapes."""
        return [config for shape in self.shapes for config in self.configs_for(shape)]

    def configs_for(self, shape: Shape) -> list[CacheConfig]:
        """``full``, then every policy, for requests of a shape."""
        return configs_of(("full", *self.policies), (round(self.ratio * shape.length),), self.seeds, self.cache)
