"""A conversation in memory, and where a request goes on with one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from h2o_stream.base.logs import Log
from h2o_stream.cache.state import State
from h2o_stream.serve.messages import Exchange
from h2o_stream.serve.requests import Options
from h2o_stream.serve.store import Kept
from h2o_stream.serve.stream import WaitingEngine
from h2o_stream.session.conversation import Conversation
from h2o_stream.session.transcript import Entry, SaidTurns

Origin = Literal["new", "continued", "branched", "read"]


@dataclass
class Live:
    """A conversation that is awake.

    Attributes:
        conversation: conversation of a `WaitingEngine`.
        kept: what is known of it; None for one that is never saved.
        options: options of the conversation.
        past: hash after the last turn on disk.
        entries: entries of the turns that are in the cache and not on disk.
        exchanges: what each of these that is no pin consists of.
        before: entries of the turns of a branch that is not on disk yet.
        merged: past turns that are fed with the one to answer, see `as_fed`.
        undone: the state before that turn, if a stop string may cut its reply off; None for an empty one.
        response: the id by which a client goes on after the last of the entries.
    """

    conversation: Conversation
    kept: Kept | None
    options: Options
    past: str
    entries: list[Entry] = field(default_factory=list)
    exchanges: list[tuple[Exchange, ...]] = field(default_factory=list)
    before: Log[Entry] = field(default_factory=Log)
    merged: tuple[Exchange, ...] = ()
    undone: State | None = None
    response: str = ""

    @property
    def engine(self) -> WaitingEngine:
        """Its engine."""
        engine = self.conversation.engine
        assert isinstance(engine, WaitingEngine)
        return engine

    def said(self) -> SaidTurns:
        """The turns, for recall."""
        session = self.kept.session if self.kept and self.kept.nbytes else None
        return SaidTurns(session.transcript.entries if session else self.before, self.entries)

    def add(self, entry: Entry, *exchanges: Exchange) -> None:
        """Note a turn that is in the cache, and what it consists of; nothing for a pin."""
        self.entries.append(entry)
        if exchanges:
            self.exchanges.append(exchanges)


@dataclass(frozen=True)
class Opened:
    """A conversation for a request.

    Attributes:
        live: the conversation.
        unread: past turns that have to be read first.
        origin: origin of the conversation.
        known: past turns that were recognised.
    """

    live: Live
    unread: tuple[Exchange, ...]
    origin: Origin
    known: int


class Place(NamedTuple):
    """A conversation after so many of its turns, which are those that are `known` of a request."""

    kept: Kept
    turn: int
    known: int


@dataclass(eq=False)
class Loading:
    """A conversation that is read into memory for a request.

    Attributes:
        place: where the request goes on.
        options: options of the request.
        engine: what it is loaded into.
        continues: whether the conversation itself goes on, and not a branch of it.
        was_busy: whether the conversation was busy before.
        live: what is loaded; None before, and if the state is not available.
        error: why nothing is.
        opened: whether it is in use.
    """

    place: Place
    options: Options
    engine: WaitingEngine
    continues: bool
    was_busy: bool
    live: Live | None = None
    error: BaseException | None = None
    opened: bool = False
