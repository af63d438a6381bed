"""The options of ``h2o-compare recall``, and those about recall of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

from h2o_stream.base.options import Option, numbers_if_any, some_of
from h2o_stream.compare.options import ComparisonOptions, InAll, Policies, Ray, Seeds, Windows
from h2o_stream.config import DEFAULT_WINDOW, EngineChoice, RecallMode
from h2o_stream.errors import ConfigError

MODES = some_of("recall", get_args(RecallMode))
"""A parser of modes of recall."""

RecallModes = Annotated[
    Sequence[RecallMode],
    Option("off, auto or wide, or several with commas.", parse=MODES),
]


@dataclass(frozen=True, kw_only=True)
class RecallOptions(ComparisonOptions):
    """Facts told in a chat and asked for later, with and without recall of what was evicted.

    A fact is asked for in the same and in other words, after an update, and there are questions about things never
    said. The full cache is asked as far as its context reaches. With --out (extra "plots") all replies are kept.
    """

    comparison = "h2o_lab.recall.comparison:Recall"
    page = "h2o_lab.recall.page:page"
    in_all = InAll(
        quick={"facts": 5, "distances": (64, 1024), "policies": ("sink", "h2o"), "recall": ("off", "auto")},
        thorough={"recall": ("off", "auto")},
    )

    text: Annotated[Path, Option("A text file, the talk between facts; repeated if it is short.")]
    policies: Policies = ("full", "sink", "h2o-paper", "h2o")
    windows: Windows = (DEFAULT_WINDOW,)
    distances: Annotated[
        Sequence[int],
        Option("Tokens between a fact and its question, separated by commas; may be empty.", parse=numbers_if_any),
    ] = (64, 1024, 4096)
    recall: RecallModes = ("off",)
    facts: Annotated[int, Option("Facts told, 30 at most.", min=1)] = 30
    chat: Annotated[
        int | None, Option("Also ask at the end of a chat of this many tokens: MT-Bench's questions.", min=1)
    ] = None
    seeds: Seeds = (0,)
    ray: Ray = None
    engine: EngineChoice = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.distances or self.chat):
            raise ConfigError("--distances is empty; give one or more, or --chat")
