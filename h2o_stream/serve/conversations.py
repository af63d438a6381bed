"""Which conversation answers a request: one that is awake or asleep, a branch of one, or a new one.

Everything here runs in the thread that owns the model, except `Conversations.commit`.
"""

from __future__ import annotations

import logging
from functools import cached_property
from weakref import proxy

from h2o_stream.base.logs import Log
from h2o_stream.config import ServeConfig
from h2o_stream.errors import ConfigError, H2OStreamError
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.recall.terms import TermWeights
from h2o_stream.serve.aside import LARGE
from h2o_stream.serve.cache_memory import CacheMemory
from h2o_stream.serve.errors import ApiError, no_response
from h2o_stream.serve.live import Live, Loading, Opened, Place
from h2o_stream.serve.messages import Exchange, chain
from h2o_stream.serve.replies import Ask
from h2o_stream.serve.requests import Options
from h2o_stream.serve.store import Kept, Store
from h2o_stream.serve.stream import Pace, WaitingEngine
from h2o_stream.serve.templates import Templates
from h2o_stream.serve.wording import as_api_error
from h2o_stream.session.conversation import Conversation
from h2o_stream.session.transcript import Header

_log = logging.getLogger(__name__)

_MANY = 500
"""Conversations with more turns take milliseconds to load."""


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

    def find(self, ask: Ask) -> Place | None:
        """Where a request goes on; None if nothing of it is known.

        Raises:
            ApiError: the response after which it goes on is not kept any more, or has other options.
        """
        owner, past = ask.options.owner, ask.hashes
        if ask.after is None:
            places = (
                Place(kept, turn, known)
                for known in self._store.last_known(past)
                for kept, turn in self._store.with_hash(past[known], owner)
            )
            return next((place for place in places if place.turn not in place.kept.stateless), None)
        kept, turn = self._store.with_id(ask.after, owner) or (None, 0)
        if kept is not None and kept.key != ask.options.key:
            what = "tools, window, policy, recall, think and pins must be those of the previous response"
            raise ApiError(400, what, "previous_response_id")
        if kept is None or turn in kept.stateless:
            raise no_response()
        return Place(kept, turn, turn)

    def open(self, ask: Ask) -> Opened:
        """A new conversation for a request.

        Raises:
            ApiError: there is no room in the window.
        """
        live, past = self._start(ask.options, ask.dialogue.system, ask.hashes[0], ask.keep), ask.dialogue.past
        return Opened(live, past, "read" if past else "new", 0)

    def open_awake(self, ask: Ask, place: Place) -> Opened | None:
        """The conversation that goes on at a place, if it is awake."""
        live = self.awake.pop(place.kept.id, None) if self._continues(ask, place) else None
        if live is None:
            return None
        self.awake[place.kept.id] = live
        return Opened(live, _unread(ask, place), "continued", place.known)

    def begin_loading(self, ask: Ask, place: Place) -> Loading:
        """What `load` loads. The conversation is busy until `open_loaded` or `end_loading`.

        Raises:
            ApiError: there is no memory for it.
        """
        continues, was_busy = self._continues(ask, place), place.kept.id in self.busy
        loading = Loading(place, ask.options, self._make_engine(ask.options), continues, was_busy)
        self.busy.add(place.kept.id)
        return loading

    def takes_long(self, loading: Loading) -> bool:
        """Whether others should not wait until it is loaded."""
        kept = loading.place.kept
        long_opening = self.templates.takes_long(kept.hashes[0], loading.options, kept.system)
        return len(kept.turns) > _MANY or kept.nbytes > LARGE or long_opening

    def load(self, loading: Loading) -> None:
        """Read the transcript and the state of a conversation into memory; any thread may do it."""
        kept, turn, _ = loading.place
        try:
            self._store.wake(kept)
            if saved := self._store.saved(kept, turn):
                conversation = self._converse(loading.engine, loading.options, kept.system, kept.hashes[0])
                conversation.load_state_dict(saved[0])
                loading.live = Live(conversation, None, loading.options, kept.hashes[turn], before=saved[1])
        except H2OStreamError as error:
            _log.warning("the state of conversation %s is not used: %s", kept.id, error)
        except BaseException as error:  # noqa: BLE001 - it is raised where the request is answered
            loading.error = error

    def open_loaded(self, ask: Ask, loading: Loading) -> Opened | None:
        """The conversation that was loaded, or a branch of it; None if its state is not available.

        Raises:
            ApiError: there is no memory for it.
        """
        place, live = loading.place, loading.live
        try:
            if loading.error is not None:
                raise loading.error
            if live is None:
                place.kept.stateless.add(place.turn)
                return None
            self._reserve(live.engine)  # its window is that of the state
            loading.opened = True
            live.kept = place.kept if loading.continues else self._branch(place) if ask.keep else None
            if live.kept is not None:
                self._make_room()
                self.awake[live.kept.id] = live
            self._prepare_recall(live)
            return Opened(live, _unread(ask, place), "continued" if loading.continues else "branched", place.known)
        finally:
            self.end_loading(loading)

    def end_loading(self, loading: Loading) -> None:
        """Forget what was loaded and is not in use, and close its conversation if nobody else uses it."""
        kept = loading.place.kept
        if not loading.was_busy:
            self.busy.discard(kept.id)
        if not loading.opened:
            self.memory.release(loading.engine)
            loading.engine.close()
        if kept.id not in self.awake and kept.id not in self.busy:
            kept.close()

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

    def _branch(self, place: Place) -> Kept:
        """A conversation that begins with the turns of another; its states are those of the turns that follow."""
        kept, turn, _ = place
        branch = self._store.create(kept.key, kept.system, kept.hashes[0], kept.owner)
        branch.hashes, branch.turns = kept.hashes.first(turn + 1), kept.turns.first(turn + 1)
        branch.stateless.update(range(turn + 1))
        return branch

    def _continues(self, ask: Ask, place: Place) -> bool:
        """Whether a request may change the conversation at a place, which is its end."""
        kept, turn, _ = place
        return ask.keep and turn == len(kept.hashes) - 1 and kept.id not in self.busy

    def _start(self, options: Options, system: str | None, first: str, keep: bool) -> Live:
        engine = self._make_engine(options)
        try:
            conversation = self._converse(engine, options, system, first)
        except ConfigError as error:
            raise as_api_error(error, "messages", "context_length_exceeded") from error
        self._reserve(engine)  # its window has grown for its system prompt and tools
        kept = self._store.create(options.key, system, first, options.owner) if keep else None
        live = Live(conversation, kept, options, first)
        self._prepare_recall(live)
        if kept:
            self._make_room()
            self.awake[kept.id] = live
        return live

    def _make_engine(self, options: Options) -> WaitingEngine:
        engine = WaitingEngine(self._model, options.cache, self.pace, self._config.speculate)
        self._reserve(engine)
        return engine

    def _converse(self, engine: WaitingEngine, options: Options, system: str | None, first: str) -> Conversation:
        template = self.templates.get(first, options, system)
        system = self._model.system if system is None else system
        return Conversation(
            engine, system, self._model.stops, options.recall_config, options.thinking, options.tools, options.effort,
            template,
        )  # fmt: skip

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


def _unread(ask: Ask, place: Place) -> tuple[Exchange, ...]:
    """What a request says before its last message, and is not known."""
    return ask.dialogue.past[place.known :] if ask.after is None else ()
