"""The options of ``h2o-compare locomo``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from h2o_lab.recall.options import RecallModes
from h2o_stream.base.options import Option, numbers_if_any
from h2o_stream.base.resources import require_package
from h2o_stream.compare.options import ComparisonOptions, Policies, Windows
from h2o_stream.config import DEFAULT_WINDOW, EngineChoice


@dataclass(frozen=True, kw_only=True)
class LocomoOptions(ComparisonOptions):
    """What recall finds for LoCoMo's questions about months of dialogue, and what the model replies (extra "rouge").

    With --out all replies are kept.
    """

    comparison = "h2o_lab.locomo.comparison:Locomo"
    page = "h2o_lab.locomo.page:page"

    dialogues: Annotated[Path, Option("The file of LoCoMo, locomo10.json.")]
    conversations: Annotated[Sequence[int], Option("Some of its ten, as 1,2,3.", parse=numbers_if_any)] = ()
    answers: Annotated[
        bool, Option("Also let the model answer its questions, or only search: seconds.", "--answers/--search")
    ] = True
    policies: Policies = ("h2o",)
    windows: Windows = (DEFAULT_WINDOW,)
    recall: RecallModes = ("auto",)
    engine: EngineChoice = "auto"

    def check(self) -> None:
        """Also check that replies can be judged."""
        super().check()
        if self.answers:
            require_package("nltk", "rouge-score", "judging replies needs NLTK, which rouge-score brings, or --search")
