"""The conversation that test_conversation_machine.py expects: a list of turns."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from h2o_stream.cache.state import State
from h2o_stream.engine.sampling import RngState
from tests.small_talk import small_model, small_tokenizer

MODEL, TOKENIZER = small_model(), small_tokenizer()


@dataclass(frozen=True)
class ExpectedTurn:
    """A turn: what was requested, and what was observed afterwards."""

    kind: str
    text: str
    events: int | None
    draws: RngState
    entry: tuple[str, ...]
    tokens: tuple[int, ...]
    digest: str


@dataclass(frozen=True)
class ExpectedConversation:
    """A conversation as it should be."""

    system: str
    turns: tuple[ExpectedTurn, ...] = ()

    @property
    def entries(self) -> list[tuple[str, ...]]:
        return [turn.entry for turn in self.turns]

    @property
    def pins(self) -> list[str]:
        return [turn.text for turn in self.turns if turn.entry[0] == "pinned"]

    @property
    def digest(self) -> str:
        return self.turns[-1].digest if self.turns else ""


def digest_of(state: State) -> str:
    whole = hashlib.sha256()
    for name in sorted(state):
        whole.update(f"{name} {state[name].shape}".encode() + state[name].tobytes())
    return whole.hexdigest()


def start_turn(talker: Any, kind: str, text: str) -> Iterator[Any]:
    """Start a turn of kind ``say``, ``pin``, ``feed`` or ``feed REPLY``."""
    kind, separator, reply = kind.partition(" ")
    if kind == "feed":
        return talker.feed_turn(text, reply if separator else "w9 w10")  # type: ignore[no-any-return]
    return (talker.say if kind == "say" else talker.pin)(text)  # type: ignore[no-any-return]
