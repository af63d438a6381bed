"""The options of ``h2o-compare divergence``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from h2o_stream.base.options import Option, some_of
from h2o_stream.compare.options import ComparisonOptions
from h2o_stream.config import EngineChoice


@dataclass(frozen=True, kw_only=True)
class DivergenceOptions(ComparisonOptions):
    """How near decode steps are to the exact model, beside llama.cpp's.

    The exact model is that of transformers in float32, on the numbers of the file. All engines get the same tokens one
    by one and keep all of them.
    """

    comparison = "h2o_lab.divergence.comparison:Divergence"
    page = "h2o_lab.divergence.page:page"

    text: Annotated[Path, Option("A text file, read by all.")]
    tokens: Annotated[int, Option("Tokens fed.", min=1)] = 496
    peers: Annotated[
        Sequence[str],
        Option(
            "Other engines: llama.cpp, ik_llama.cpp (extra bench).",
            parse=some_of("peer", ("llama.cpp", "ik_llama.cpp"), may_be_none=True),
        ),
    ] = ("llama.cpp",)
    engine: EngineChoice = "auto"
