"""STUB until the facade is merged."""

from __future__ import annotations

from h2o_stream.config import RecallConfig, RecallMode
from h2o_stream.recall.passage import Candidate


class Recall:
    """STUB."""

    def __init__(self, config: RecallConfig = RecallConfig()) -> None:
        self.mode: RecallMode = config.mode
        self.notify = print
        self.last: tuple[Candidate, ...] = ()

    def decide(self, message: str) -> list[Candidate]:
        """STUB."""
        return []
