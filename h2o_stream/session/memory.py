"""What the memory behind the window holds of a conversation, and what attention finds in it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy

from h2o_stream.cache.token_memory import TokenMemory
from h2o_stream.engine.engine import Engine
from h2o_stream.errors import H2OStreamError
from h2o_stream.session.conversation_state import TurnSpan


@dataclass(frozen=True)
class MemoryReport:
    """The memory of a conversation.

    Attributes:
        tokens: number of tokens in the head that has most.
        forgotten: the oldest, for which it was too small.
        nbytes: bytes on disk.
        turns: turns to which the last token attends most, with the number of such query heads, the largest first.
        queries: query heads that found anything.
    """

    tokens: int
    forgotten: int
    heads: int
    nbytes: int
    limit_bytes: int
    turns: list[tuple[int, int]]
    queries: int


def memory_of(engine: Engine) -> TokenMemory | None:
    """The memory behind the window, if there is one."""
    return engine.cache.memory


def report_memory(engine: Engine, spans: list[TurnSpan]) -> MemoryReport:
    """What the memory holds, and which turns were found again; raises H2OStreamError if there is none."""
    memory = memory_of(engine)
    if memory is None:
        raise H2OStreamError("there is no memory behind the window; start with --memory auto")
    tokens = [token for row in memory.rows for token in row.looked_back()]
    turns = Counter(turn for token in tokens if (turn := _turn_of(token, spans)) is not None)
    forgotten = max((row.dropped for row in memory.rows), default=0)
    return MemoryReport(
        memory.tokens, forgotten, memory.num_heads, memory.nbytes, memory.limit_bytes, turns.most_common(), len(tokens)
    )


@dataclass(frozen=True)
class Remembered:
    """Some tokens in memory: how many KV heads have one, and in how many query heads the last token found it again."""

    heads: int
    found: int


def remembered(engine: Engine, tokens: range) -> Remembered | None:
    """How tokens are remembered; None if they are not."""
    memory = memory_of(engine)
    if memory is None:
        return None
    heads = total = 0
    for row in memory.rows:
        for head in range(memory.num_heads):
            indices = row.token_indices(head)
            heads += bool(numpy.any((indices >= tokens.start) & (indices < tokens.stop)))
        total += sum(token in tokens for token in row.looked_back())
    return Remembered(heads, total) if heads else None


def _turn_of(token: int, spans: list[TurnSpan]) -> int | None:
    return next((span.turn for span in spans if span.start <= token < span.stop), None)
