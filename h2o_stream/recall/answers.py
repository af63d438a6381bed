"""Finds what the user said that answers a question, by the answer head of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from functools import cached_property

from h2o_stream.engine.engine import Engine
from h2o_stream.recall.answer_head import AnswerHead, Place, Reader, find_head, score
from h2o_stream.recall.decision import states
from h2o_stream.recall.index import PassageIndex
from h2o_stream.recall.passage import Passage
from h2o_stream.runtime.first_layers import MAX_TOKENS
from h2o_stream.runtime.measured import read_answer_head, save_answer_head

_READ_AT_ONCE = 32
"""Passages that are read after a turn or before a decision: 1 s, if there are so many (embedded model)."""

_COMPARED = 4096
"""Passages that a question is compared with, the newest ones: 0.1 s."""


class Answers:
    """Keeps the keys of what the user typed in the index, and compares questions with them.

    Where there is no answer head nothing is found.

    Args:
        engine: the engine of the conversation.
        place: returns how the model reads a text that stands alone; None if nobody knows.
    """

    def __init__(self, engine: Engine, place: Callable[[], Place | None]) -> None:
        self._engine, self._place = engine, place

    def read(self, index: PassageIndex) -> None:
        """Read typed passages whose keys are not known, the newest first."""
        if (reader := self._reader) is None:
            return
        for number, text in index.without_keys(self._name, _READ_AT_ONCE):
            keys = reader.keys(text) if states(text) else None
            index.add_keys(self._name, number, keys, 0.0 if keys is None else reader.baseline(keys))

    def find(self, question: str, index: PassageIndex) -> Passage | None:
        """What answers a question best; None if nothing does."""
        if (reader := self._reader) is None:
            return None
        self.read(index)
        queries = reader.queries(question)
        known = index.with_keys(self._name, queries.shape[1], _COMPARED)
        scores = {number: score(queries, keys, baseline) for number, keys, baseline in known}
        best = max(scores, key=scores.__getitem__, default=None)
        return index.passage(best) if best is not None and scores[best] >= reader.head.min_score else None

    @property
    def _digest(self) -> str:
        return self._engine.cache.model_digest() if self._engine.cache.evicts else ""

    @property
    def _name(self) -> str:
        assert self._reader is not None
        return f"{self._digest} {self._reader.head.layer} {self._reader.head.query_head}"

    @cached_property
    def _reader(self) -> Reader | None:
        place = self._place()
        if place is None or place("Yes.").around > MAX_TOKENS // 2 or (head := self._head(place)) is None:
            return None
        first = self._engine.served.first_layers(head.layer + 1)
        return Reader(head, first.project, place) if first else None

    def _head(self, place: Place) -> AnswerHead | None:
        """The answer head, which is looked for where it is not known."""
        if (known := read_answer_head(self._digest)) is not None:
            return AnswerHead(*known) if known else None
        if (layers := self._engine.served.first_layers()) is None:
            return None
        head = find_head(layers.project, place)
        save_answer_head(self._digest, astuple(head) if head else ())
        return head
