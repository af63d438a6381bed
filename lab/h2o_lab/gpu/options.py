"""The options of ``h2o-compare gpu``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from h2o_stream.base.options import Option, numbers
from h2o_stream.compare.options import ComparisonOptions


@dataclass(frozen=True, kw_only=True)
class GpuOptions(ComparisonOptions):
    """What a GPU does with this cache, in minutes: right, fast, and at constant memory.

    A model with random weights, in Llama-3-8B's shape: steps and prompts beside what its memory allows and beside a
    full cache, batches beside a full cache in host memory, and a stream of 100,000 tokens. Then the families of models
    against the CPU, in a checkout. With --out what is over --minutes is left to the next time.
    """

    comparison = "h2o_lab.gpu.comparison:Gpu"

    random_weights: Annotated[Path | None, Option("A config.json: another shape.")] = None
    windows: Annotated[Sequence[int], Option("Windows, separated by commas.", parse=numbers)] = (256, 1024, 4096)
    minutes: Annotated[float, Option("After so many minutes nothing new begins.", min=0)] = 8.0
    stream: Annotated[int, Option("Tokens of the stream.", min=2000)] = 100_000
    policies: Sequence[str] = ("h2o",)
