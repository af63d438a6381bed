"""The comparisons of ``h2o-compare``: for each one a dataclass whose fields are the options of its subcommand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from h2o_stream.base.options import Option, listed_if_any, numbers, paths, some_of
from h2o_stream.base.registry import Registry
from h2o_stream.base.resources import require_package
from h2o_stream.compare.options import (
    CacheSizes,
    ComparisonOptions,
    InAll,
    Policies,
    Ray,
    Seeds,
    Windows,
    configs_of,
)
from h2o_stream.config import DEFAULT_WINDOW, CacheConfig, EngineChoice, ModelConfig
from h2o_stream.errors import ConfigError

PEERS = {
    "transformers": "transformers",
    "llama.cpp": "llama-cpp-python",
    "ik_llama.cpp": "ik-llama-cpp-python",
    "openvino": "openvino-genai",
}
"""Other engines that ``speed`` can time, and the packages that have them."""


def require_peer(peer: str, model: str | None) -> None:
    """Raise H2OStreamError if a peer is not installed, or needs a GGUF file that the model is not."""
    from h2o_stream.models.find import gguf_file

    package = PEERS[peer]
    module = package.removesuffix("-python").replace("-", "_")
    require_package(module, package, f"the peer {peer} needs {package}")
    if peer != "transformers" and model and gguf_file(model) is None:
        raise ConfigError(f"there is no GGUF file {model}, which the peer {peer} needs; leave it out of --peers")


@dataclass(frozen=True, kw_only=True)
class NllOptions(ComparisonOptions):
    """Negative log-likelihood of long texts, streamed through each policy's cache.

    A full cache is compared inside the model's context only. The chunk is the number of tokens between two
    evictions; 1 is exactly what decoding does. With --out (extra "plots" for its plots) an interrupted comparison
    resumes.
    """

    comparison = "h2o_stream.compare.nll:Nll"
    page = "h2o_stream.ui.pages.nll:page"
    in_all = InAll(
        quick={"tokens": 2048, "windows": (128, 256)},
        thorough={"tokens": 8192, "windows": (64, 256, 1024)},
    )

    text: Annotated[Sequence[Path], Option("Text files, separated by commas.", parse=paths)]
    policies: Policies = ("full", "recent", "sink", "h2o-paper", "h2o")
    windows: Windows = (DEFAULT_WINDOW,)
    cache_sizes: CacheSizes = ()
    tokens: Annotated[int, Option("Tokens predicted per text.", min=1)] = 4096
    masked: Annotated[
        bool, Option("Mask tokens instead of evicting them, as h2o_hf simulates it: memory grows.", "--masked")
    ] = False
    seeds: Seeds = (0,)
    ray: Ray = None
    engine: EngineChoice = "auto"

    @property
    def configs(self) -> list[CacheConfig]:
        """Every policy with every window, or with every size."""
        return configs_of(self.policies, self.windows, self.seeds, self.cache, self.cache_sizes)

    @property
    def variant(self) -> str:
        """Tokens are masked by the laboratory."""
        return "masked" if self.masked else ""


@dataclass(frozen=True, kw_only=True)
class SpeedOptions(ComparisonOptions):
    """Speed and memory at growing histories, beside other engines.

    All engines read the same text, each in its own process, and decode in turn; the median of the rounds is reported.
    Each speed is also given as a fraction of what memory allows: the bandwidth measured in the same run over the bytes
    of weights and cache.
    """

    comparison = "h2o_stream.compare.speed.comparison:Speed"
    page = "h2o_stream.ui.pages.speed:page"
    in_all = InAll(
        quick={"histories": (256, 1024)},
        thorough={"histories": (256, 2048, 8192)},
    )

    text: Annotated[Path, Option("A text file, read by all.")]
    policies: Policies = ("full", "recent", "h2o")
    windows: Windows = (DEFAULT_WINDOW,)
    histories: Annotated[
        Sequence[int], Option("Tokens seen when decoding is timed, separated by commas.", parse=numbers)
    ] = (256, 1024, 2048, 8192)
    dtypes: Annotated[Sequence[str], Option("Instead of --dtype, separated by commas.", parse=listed_if_any)] = ()
    quantizations: Annotated[
        Sequence[str], Option("Instead of --quantize, separated by commas.", parse=listed_if_any)
    ] = ()
    peers: Annotated[
        Sequence[str],
        Option(
            "Other engines: transformers, llama.cpp, ik_llama.cpp, openvino (extra bench).",
            parse=some_of("peer", PEERS, may_be_none=True),
        ),
    ] = ("transformers",)
    threads: Annotated[int | None, Option("Threads of every engine.", min=1)] = None
    random_weights: Annotated[
        Path | None, Option("A config.json: time that model with random weights, stored as --quantize says.")
    ] = None
    engine: EngineChoice = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.models

    def check(self) -> None:
        """Also check the text and the peers."""
        super().check()
        for peer in self.peers:
            require_peer(peer, None if self.random_weights else self.model.model)

    @property
    def variant(self) -> str:
        """Random weights are made by the laboratory."""
        return "random-weights" if self.random_weights else ""

    @property
    def models(self) -> list[ModelConfig]:
        """The model in every precision."""
        return [
            replace(self.model, dtype=dtype, quantize=quantize)
            for dtype in self.dtypes or (self.model.dtype,)
            for quantize in self.quantizations or (self.model.quantize,)
        ]


def _options_class(named: Any) -> type[ComparisonOptions]:
    if not (isinstance(named, type) and issubclass(named, ComparisonOptions)):
        raise TypeError(f"{named!r} is not a class derived from ComparisonOptions")
    return named


COMPARISONS: Registry[type[ComparisonOptions]] = Registry(
    "h2o_stream.comparisons",
    {
        "nll": NllOptions,
        "speed": SpeedOptions,
    },
    _options_class,
)
"""Subcommands of ``h2o-compare``, by name."""

COMMANDS: Registry[Any] = Registry("h2o_stream.commands", {}, lambda named: named)
"""Subcommands that are no comparisons: dataclasses of options, whose method ``run`` gets terminal and records."""
