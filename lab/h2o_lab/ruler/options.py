"""The options of RULER's tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from h2o_lab.recall.options import MODES
from h2o_lab.ruler.items import SINGLE, TASKS
from h2o_stream.base.options import Option, numbers_if_any, some_of
from h2o_stream.compare.options import ComparisonOptions
from h2o_stream.config import RecallMode
from h2o_stream.errors import ConfigError

Form = Literal["one-turn", "multi-turn"]
"""Whether a question comes with its context, or one after another in a conversation."""


@dataclass(frozen=True, kw_only=True)
class RulerOptions(ComparisonOptions):
    """Those of ``h2o-compare tasks --suite ruler``, beside what every comparison has."""

    tasks: Sequence[str] = ()
    forms: Annotated[
        Sequence[Form], Option("ruler: one-turn, multi-turn, or both.", "--form", parse=some_of("form", get_args(Form)))
    ] = get_args(Form)
    lengths: Annotated[
        Sequence[int],
        Option(
            "Tokens of a context, or of the part of the book that is read at once (0: all of it), separated by commas. "
            "(default: ruler 1024,4096, book 128,4096,0)",
            parse=numbers_if_any,
        ),
    ] = ()
    recall: Annotated[
        Sequence[RecallMode],
        Option("ruler in turns, book: off, auto or wide, or several with commas.", parse=MODES),
    ] = ("off",)
    depths: Annotated[
        Sequence[int],
        Option(
            "ruler: depths of the needle in %, for a heatmap of niah_single by length and depth.", parse=numbers_if_any
        ),
    ] = ()
    items: Annotated[int, Option("ruler: contexts for each task, form and length.", min=2)] = 8
    haystack: Annotated[
        Literal["text", "noise"], Option("ruler: what needles are hidden in: a text, or a few repeated sentences.")
    ] = "text"
    text: Annotated[Path | None, Option("ruler: a text file. (default: the manual of Python)")] = None
    seed: Annotated[int, Option("ruler: seed of the contexts.", min=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for depth in self.depths:
            if depth > 100:
                raise ConfigError(f"a depth of {depth}% is outside the context; --depths takes 0 to 100")
        if self.depths and (set(self.tasks) - {SINGLE} or self.forms not in (get_args(Form), ("one-turn",))):
            raise ConfigError(f"--depths goes with {SINGLE} in one turn only; leave out --tasks and --form")

    @property
    def chosen_tasks(self) -> tuple[str, ...]:
        """The tasks named, or all; with depths the one that has them."""
        return (SINGLE,) if self.depths else tuple(self.tasks or TASKS)

    @property
    def chosen_lengths(self) -> tuple[int, ...]:
        """The lengths given, or two."""
        return tuple(self.lengths or (1024, 4096))

    @property
    def chosen_forms(self) -> tuple[Form, ...]:
        """The forms; with depths the one that has them."""
        return ("one-turn",) if self.depths else tuple(self.forms)
