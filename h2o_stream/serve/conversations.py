"""Which conversation answers a request: one that is awake or asleep, a branch of one, or a new one.

Everything here runs in the thread that owns the model, except `Conversations.commit`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal
from weakref import proxy

from h2o_stream.base.logs import Log
from h2o_stream.cache.state import State
from h2o_stream.config import ServeConfig
from h2o_stream.errors import ConfigError, DataError, H2OStreamError
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.recall.terms import TermWeights
from h2o_stream.serve.cache_memory import CacheMemory
from h2o_stream.serve.errors import ApiError, no_response
from h2o_stream.serve.messages import Dialogue, Exchange, chain
from h2o_stream.serve.requests import Options
from h2o_stream.serve.store import Kept, Store
from h2o_stream.serve.stream import Pace, WaitingEngine
from h2o_stream.serve.templates import Templates
from h2o_stream.serve.wording import as_api_error
from h2o_stream.session.conversation import Conversation
from h2o_stream.session.transcript import Entry, Header, SaidTurns

_log = logging.getLogger(__name__)

_MANY, _LARGE = 500, 2**18
"""Conversations with more turns, or bytes of text, are woken in another thread: to parse them takes milliseconds."""

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


class Conversations:
    """The conversations of a server.

    Args:
        model: its model is one of `ManyStreams`.
        config: configuration of the server.
        store: the conversations on disk.

    Attributes:
        awake: those in memory by id, least recently used first.
        busy: ids of those that answer or are being saved.
        pace: pace of their prompts.
        memory: memory of their caches.
        templates: templates of those used last.
    """

    def __init__(self, model: LoadedModel, config: ServeConfig, store: Store) -> None:
        self._model, self._config, self._store = model, config, store
        self.memory, self.templates = CacheMemory(model.model.free_bytes), Templates(model)
        self.awake: dict[str, Live] = {}
        self.busy: set[str] = set()
        self.pace = Pace()

    def prepare_recall(self) -> None:
        """Make what recall needs of the model, before somebody waits for it."""
        self._terms.prepare()

    def open(self, dialogue: Dialogue, past: Sequence[str], options: Options, keep: bool) -> Opened:
        """The conversation that continues a dialogue, with these hashes; with `keep` it is saved after each turn.

        Raises:
            ApiError: there is no room in the window.
        """
        for known in self._store.last_known(past):
            for kept, turn in self._store.with_hash(past[known], options.owner):
                if opened := self._known(kept, turn, options, keep):
                    return Opened(opened[0], dialogue.past[known:], opened[1], known)
        live = self._start(options, dialogue.system, past[0], keep)
        return Opened(live, dialogue.past, "read" if dialogue.past else "new", 0)

    def open_after(self, response: str, options: Options, keep: bool) -> Opened:
        """The conversation after the response of this id; with `keep` it is saved after each turn.

        Raises:
            ApiError: it is not kept any more, or has other options.
        """
        kept, turn = self._store.with_id(response, options.owner) or (None, 0)
        if kept is not None and kept.key != options.key:
            what = "tools, window, policy, recall, think and pins must be those of the previous response"
            raise ApiError(400, what, "previous_response_id")
        if kept is not None and (opened := self._known(kept, turn, options, keep)):
            return Opened(opened[0], (), opened[1], turn)
        raise no_response()

    def sleeping(self, past: Sequence[str], after: str | None, options: Options) -> Kept | None:
        """The conversation that continues these hashes, or a response, if waking it up takes long."""
        owner = options.owner
        if after is None:
            known = (past[number] for number in self._store.last_known(past))
            found = next((pair for one in known for pair in self._store.with_hash(one, owner)), None)
        else:
            found = self._store.with_id(after, owner)
        kept = found[0] if found else None
        if kept is None or kept.session is not None:
            return None
        is_long = len(kept.turns) > _MANY or self._store.text_bytes(kept) > _LARGE or self._opens_long(kept, options)
        return kept if is_long else None

    def _opens_long(self, kept: Kept, options: Options) -> bool:
        """Whether its system prompt and tools have to be read first."""
        return kept.key == options.key and self.templates.takes_long(kept.hashes[0], options, kept.system)

    def wake(self, kept: Kept, options: Options) -> None:
        """Read the transcript, and make the template, of a conversation that is busy; any thread may do it."""
        with suppress(H2OStreamError):
            self._store.wake(kept)
            if self._opens_long(kept, options):
                self.templates.get(kept.hashes[0], options, kept.system)

    def open_raw(self, options: Options) -> Opened:
        """An empty stream for a text that is continued as it is, which is not kept."""
        live = self._start(options, None, "", keep=False)
        live.engine.unpin()
        return Opened(live, (), "new", 0)

    def system_before(self, response: str, owner: str) -> str | None:
        """The system prompt of the conversation in which an owner got a response.

        Raises:
            ApiError: there is none.
        """
        stored = self._store.with_id(response, owner)
        if stored is None:
            raise no_response()
        return stored[0].system

    def _known(self, kept: Kept, turn: int, options: Options, keep: bool) -> tuple[Live, Origin] | None:
        """Continue a conversation after a turn, or branch there; None if the state is not available."""
        newest = turn == len(kept.hashes) - 1
        if keep and newest and kept.id not in self.busy:
            if live := self.awake.pop(kept.id, None):
                self.awake[kept.id] = live
                return live, "continued"
            if live := self._wake(kept, options, turn):
                self._make_room()
                self.awake[kept.id] = live
                return live, "continued"
            return None
        saved = self._store.saved(kept, turn)
        if kept.id not in self.awake:
            kept.close()
        if saved is None:
            return None
        live = self._load(kept, options, saved, turn)
        if live is None:
            return None
        if keep:
            live.kept = branch = self._store.create(kept.key, kept.system, kept.hashes[0], kept.owner)
            branch.hashes, branch.turns = kept.hashes.first(turn + 1), kept.turns.first(turn + 1)
            self._make_room()
            self.awake[branch.id] = live
        self._prepare_recall(live)
        return live, "branched"

    def _wake(self, kept: Kept, options: Options, turn: int) -> Live | None:
        """Load a conversation after its last turn; None if the state is not available."""
        live = None
        try:
            with suppress(DataError):
                self._store.wake(kept)
                if (saved := self._store.saved(kept, turn)) and (live := self._load(kept, options, saved, turn)):
                    live.kept = kept
                    self._prepare_recall(live)
            return live
        finally:
            if live is None:
                kept.close()

    def _load(self, source: Kept, options: Options, saved: tuple[State, Log[Entry]], turn: int) -> Live | None:
        """What is known of a conversation after a turn, as one that is not kept yet."""
        conversation, (state, entries) = self._converse(options, source.system, source.hashes[0]), saved
        try:
            conversation.load_state_dict(state)
        except H2OStreamError as error:
            _log.warning("the state of conversation %s is not used: %s", source.id, error)
            return None
        return Live(conversation, None, options, source.hashes[turn], before=entries)

    def _start(self, options: Options, system: str | None, first: str, keep: bool) -> Live:
        try:
            conversation = self._converse(options, system, first)
        except ConfigError as error:
            raise as_api_error(error, "messages", "context_length_exceeded") from error
        kept = self._store.create(options.key, system, first, options.owner) if keep else None
        live = Live(conversation, kept, options, first)
        self._prepare_recall(live)
        if kept:
            self._make_room()
            self.awake[kept.id] = live
        return live

    def _converse(self, options: Options, system: str | None, first: str) -> Conversation:
        engine = WaitingEngine(self._model, options.cache, self.pace, self._config.speculate)
        self._reserve(engine)
        template = self.templates.get(first, options, system)
        system = self._model.system if system is None else system
        conversation = Conversation(
            engine, system, self._model.stops, options.recall_config, options.thinking, options.tools, options.effort,
            template,
        )  # fmt: skip
        self._reserve(engine)  # its window has grown for its system prompt and tools
        return conversation

    def _reserve(self, engine: WaitingEngine) -> None:
        """Put conversations to sleep until a cache fits beside the others; see `CacheMemory`."""
        idle = [live for name, live in self.awake.items() if name not in self.busy][::-1]

        def make_room() -> bool:
            if idle:
                self.drop(idle.pop())
                return True
            return False

        self.memory.reserve(engine, make_room)

    def _prepare_recall(self, live: Live) -> None:
        session, recall = live.kept and live.kept.session, live.conversation.recall
        recall.use(session.index_path if session else None)
        weak = proxy(live)
        recall.source, recall.defers, recall.terms = (lambda: weak.said()), True, self._terms
        recall.in_pieces = False  # what a reply takes is counted in the stream of its conversation

    @cached_property
    def _terms(self) -> TermWeights:
        return TermWeights(self._model.tokenizer, self._model.model.read_embeddings)

    def _make_room(self) -> None:
        """Put the least recently used ones to sleep, which are on disk as they are."""
        idle = [name for name in self.awake if name not in self.busy]
        for name in idle[: max(len(self.awake) + 1 - self._config.awake, 0)]:
            self.drop(self.awake[name])

    def drop(self, live: Live) -> None:
        """Forget what is in memory of a conversation."""
        if live.kept is not None:
            self.awake.pop(live.kept.id, None)
            live.kept.close()
            if not live.kept.nbytes:
                self._store.forget(live.kept)
        self.memory.release(live.engine)
        try:
            live.conversation.recall.close()
        finally:
            live.engine.close()

    def commit(self, live: Live) -> None:
        """Save the turns that are not on disk yet. The conversation is busy; any thread may do it.

        Raises:
            H2OStreamError: it cannot be saved.
        """
        if live.kept is None or not live.entries:
            return
        plan = live.engine.cache.plan
        header = Header(self._model.name, plan.policy, plan.window, live.conversation.system)
        state = live.conversation.state_dict()
        before = live.before if not live.kept.nbytes else ()
        hashes, past = list[str](), live.past
        for exchanges in live.exchanges:
            past = chain(past, exchanges)[-1]
            hashes.append(past)
        self._store.wake(live.kept)
        if not live.kept.nbytes and live.kept.session:
            live.conversation.recall.use(live.kept.session.index_path)
        live.conversation.recall.add_deferred()
        self._store.save(live.kept, header, live.entries, hashes, state, before, live.response)
        live.past = past

    def committed(self, live: Live) -> None:
        """Recognise the conversation by its saved turns, and forget those that there is no room for."""
        if live.kept is not None:
            self._store.committed(live.kept, len(live.exchanges), filter(None, [live.response]))
        live.entries, live.exchanges, live.before, live.response = [], [], Log(), ""
        for kept in self._store.to_forget({*self.awake, *self.busy}):
            self._store.forget(kept)
