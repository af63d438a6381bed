"""The options of ``h2o-compare speculation``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from h2o_stream.base.options import Option, some_of
from h2o_stream.compare.catalog import require_peer
from h2o_stream.compare.options import ComparisonOptions, Policies, Windows
from h2o_stream.config import DEFAULT_WINDOW, EngineChoice

TASKS = ("edit", "recall", "json", "prose")
"""Kinds of replies: code again with a change, a passage again, JSON by a schema, a story."""


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions(ComparisonOptions):
    """Speed of replies with guesses and without, beside llama.cpp with its own lookup (extra "bench")."""

    comparison = "h2o_lab.speculation.comparison:Speculation"
    page = "h2o_lab.speculation.page:page"

    tasks: Annotated[Sequence[str], Option("edit, recall, json, prose.", parse=some_of("task", TASKS))] = TASKS
    policies: Policies = ("h2o",)
    windows: Windows = (DEFAULT_WINDOW,)
    peers: Annotated[
        Sequence[str], Option("llama.cpp, or none.", parse=some_of("peer", ("llama.cpp",), may_be_none=True))
    ] = ()
    threads: Annotated[int | None, Option("Threads of llama.cpp.", min=1)] = None
    engine: EngineChoice = "auto"

    def check(self) -> None:
        """Also check the peers."""
        super().check()
        for peer in self.peers:
            require_peer(peer, self.model.model)
