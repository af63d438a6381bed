"""Changes to a conversation that happen completely or not at all.

`Transactions.checkpoint` is the last committed version. A change is made to the conversation first, then to the session
on disk if there is one, and replaces the checkpoint at its end. A change that is cut off earlier is rolled back: the
conversation returns to the last turn of the checkpoint, immediately or, if that is cut off too, before the next change.
A checkpoint reads its turns from its session. So a change whose line is on disk has happened, and rolling back
completes it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TypeVar

from h2o_stream.base.logs import Log
from h2o_stream.cache.state import State
from h2o_stream.engine.events import Finished, PrefillProgress
from h2o_stream.engine.sampling import RngState
from h2o_stream.errors import DataError, H2OStreamError, means_out_of_memory
from h2o_stream.session.checkpoint import Checkpoint
from h2o_stream.session.conversation import Conversation
from h2o_stream.session.sessions import Session
from h2o_stream.session.transcript import Entry, Header, Kind, SaidTurns

_Events = TypeVar("_Events", bound=Generator[object, None, None])


class ResumeError(H2OStreamError):
    """A state cannot be resumed, but turns can be fed again: it belongs to another model, dtype or policy."""


class NoStateError(ResumeError):
    """There is no state: it is too old, or was not saved."""


class Transactions:
    """A conversation and its last committed version.

    Attributes:
        start_session: makes an automatic session of the first message, once there is a turn; None for no such session.
    """

    def __init__(self, conversation: Conversation, header: Header) -> None:
        self.conversation = conversation
        self._left: list[Checkpoint] = []  # whose sessions have to be released
        self._checkpoint = Checkpoint(conversation.metadata, self.rng_state)
        self._plan = conversation.engine.cache.plan
        self._header = header
        self.start_session: Callable[[str], Session] | None = None
        self._refused = False
        self._opened: Session | None = None  # keeps its lock only if it is committed
        conversation.recall.source = self._said

    def _said(self) -> SaidTurns:
        return SaidTurns(self.checkpoint.entries)

    @property
    def rng_state(self) -> RngState:
        """State of the sampler's random generator."""
        return self.conversation.engine.sampler.rng_state

    @rng_state.setter
    def rng_state(self, state: RngState) -> None:
        self.conversation.engine.sampler.rng_state = state

    @property
    def header(self) -> Header:
        """The header for a session of this conversation."""
        return replace(self._header, system=self.conversation.system)

    @property
    def checkpoint(self) -> Checkpoint:
        """The last committed version."""
        return self._checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: Checkpoint) -> None:
        if self._checkpoint.session is not checkpoint.session:
            self._left.append(self._checkpoint)
        self._checkpoint, self._plan = checkpoint, self.conversation.engine.cache.plan

    @property
    def committed(self) -> bool:
        """Whether the conversation equals the checkpoint."""
        return self._has_plan and self.conversation.metadata == self.checkpoint.metadata and not self.conversation.torn

    @property
    def _has_plan(self) -> bool:
        """Whether the window is that of the checkpoint: one that grew for a turn does not shrink without it."""
        return self.conversation.engine.cache.plan == self._plan

    def close(self) -> None:
        """Release the session for other processes. The conversation continues in memory."""
        try:
            self.conversation.active.close()
        finally:
            self.discard_opened()
            checkpoint, self._opened = self.checkpoint, None
            self.checkpoint = replace(checkpoint, session=None, unsaved=checkpoint.entries)
            self.conversation.recall.use(None)
            self._release_left()

    # starting a change

    def prepare(self) -> None:
        """Close the active turn and complete any pending rollback. Every change starts with this."""
        self.conversation.active.close()
        self.discard_opened()
        self.roll_back()
        self._release_left()
        checkpoint = replace(self.checkpoint, rng_state=self.rng_state)
        turn = checkpoint.last_turn
        if turn and checkpoint.session is None and turn not in checkpoint.states and self.committed:
            state = self.copy_state()  # the session that had it may have been closed
            checkpoint = checkpoint if state is None else replace(checkpoint, states={**checkpoint.states, turn: state})
        self.checkpoint = checkpoint

    def start(self, events: _Events) -> _Events:
        """Prepare a change that lasts while its events are read. Any other call closes it."""
        self.prepare()
        return self.conversation.active.start(events)

    def open_session(self, name: str, create: bool) -> Session:
        """Open another session for the current change; for errors see `Session`."""
        session = self.checkpoint.session
        if session is not None and session.name == name:
            raise DataError(f"session {name} is already open; choose another name")
        self._opened = Session(name, create=create)
        return self._opened

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """A block that changes the conversation and commits. Whatever is uncommitted at its end is rolled back."""
        try:
            yield
        finally:
            self.discard_opened()
            self.roll_back()
            self._release_left()

    def _release_left(self) -> None:
        """Release sessions that the conversation has left, also those whose release was cut off before."""
        while self._left:
            if self._left[-1].session is not self.checkpoint.session:
                self._left[-1].release()
            self._left.pop()

    def discard_opened(self) -> None:
        """Close the last opened session, and delete it if it is new, unless it was committed or kept."""
        if self._opened is not None and self._opened is not self.checkpoint.session:
            self._opened.discard()
            self._opened = None

    def replay(self, entries: Iterable[Entry]) -> Generator[PrefillProgress | Finished, None, Checkpoint | None]:
        """Feed turns to the conversation, which has none. Yields their events; one that ends early is the last one.

        Returns the conversation after the last turn, for a commit; None if it was rolled back.
        """
        conversation = self.conversation
        replayed = Checkpoint(conversation.metadata, self.rng_state)
        for entry in entries:
            pinned, text = entry.kind == "pinned", entry.prompt
            with closing(conversation.pin(text) if pinned else conversation.feed_turn(text, entry.text)) as events:
                for event in events:
                    if isinstance(event, Finished):
                        self.roll_back()
                        yield event
                        return None
                    yield event
            state, metadata = self.copy_state(), conversation.metadata
            replayed = replayed.with_turn(metadata, replace(entry, turn=metadata.turns), state)
        return replayed

    # ending a change

    def keep_opened(self) -> None:
        """Close the last opened session and keep it on disk. The conversation does not move to it."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def commit_session(self, session: Session | None, states: Mapping[int, State] | None = None) -> None:
        """Commit the current conversation, with all its turns in this session; None for one without a turn."""
        self.checkpoint = Checkpoint(self.conversation.metadata, self.rng_state, session, states=states or {})
        if session is None:
            self.conversation.recall.use(None)
            return
        self.conversation.recall.use(session.index_path)
        self.conversation.recall.synchronize()

    def commit_up_to(self, turn: int) -> None:
        """Commit the current conversation, with the turns up to this one; 0 for none."""
        old = self.checkpoint
        unsaved = old.unsaved.upto(turn, lambda entry: entry.turn)
        states = {number: state for number, state in old.states.items() if number <= turn}
        self.checkpoint = Checkpoint(self.conversation.metadata, self.rng_state, old.session, unsaved, states)

    def commit_turn(self, text: str, reply: str, kind: Kind, finish: str, thinking: str = "") -> None:
        """Commit the active turn, unless it is; DataError says that it is committed, but not saved completely."""
        if self.committed:
            return
        state = self.copy_state()  # closes the turn, so the metadata is final afterwards
        checkpoint, metadata = self.checkpoint, self.conversation.metadata
        if metadata.last_start[0] != metadata.turns:  # nothing was fed
            if self._has_plan:
                self.checkpoint = replace(checkpoint, metadata=metadata)
            return
        if kind == "pinned" and metadata.pins == checkpoint.metadata.pins:  # cut off before its end
            kind = "told"
        entry = Entry(metadata.turns, text, reply, kind, finish, thinking=thinking)
        longer, session = checkpoint.with_turn(metadata, entry, state), checkpoint.session
        if session is None:
            self.checkpoint = longer
            self._start_session()
            return
        try:
            session.add(entry, None if session.automatic else state, self.header)
        except DataError:
            states = {} if state is None else {entry.turn: state}
            self.checkpoint = replace(longer, unsaved=Log(), states=longer.states if session.automatic else states)
            if not (session.automatic and self._refused):
                self._refused = session.automatic
                raise
            return
        self._refused = False
        self.checkpoint = replace(longer, unsaved=Log(), states=longer.states if session.automatic else {})

    def _start_session(self) -> None:
        """Keep the conversation in an automatic session from now on, if there is to be one.

        Raises:
            DataError: that is impossible now, which is said once and tried again after every turn.
        """
        checkpoint = self.checkpoint
        if self.start_session is None:
            return
        try:
            session = self.start_session(checkpoint.unsaved[0].prompt)
            try:
                session.add_all(self.header, checkpoint.unsaved, lambda turn: None)
            except BaseException:
                session.discard()
                raise
        except DataError as error:
            if not self._refused:
                self._refused = True
                raise DataError(f"this chat is not kept, which is tried again after every turn: {error}") from error
            return
        self._refused = False
        self.checkpoint = replace(checkpoint, session=session, unsaved=Log())

    def roll_back(self) -> None:
        """Return to the checkpoint. If its state is no longer available, the conversation is torn until a reset."""
        if self.committed:
            return
        checkpoint = self.checkpoint
        self.conversation.recall.invalidate()
        try:
            self.restore(checkpoint.last_turn)
        except H2OStreamError:
            self.conversation.engine.reset()  # what was said since is no part of the checkpoint
            return
        if self.conversation.metadata.turns == checkpoint.metadata.turns:
            self.rng_state = checkpoint.rng_state  # otherwise the change is on disk and is now complete
        self.checkpoint = replace(checkpoint, metadata=self.conversation.metadata)

    def restore(self, turn: int) -> None:
        """Return the conversation to its state after a turn of the checkpoint; 0 for the start. Commits nothing.

        Raises:
            H2OStreamError: the state after that turn is no longer available or is damaged. Nothing has changed.
        """
        checkpoint = self.checkpoint
        if not turn:
            header = checkpoint.session and checkpoint.session.transcript.header
            self.conversation.restart(header.system if header else checkpoint.metadata.system)
            return
        state = checkpoint.state(turn)
        if state is None:
            raise NoStateError(f"cannot return to turn {turn}: its state is too old or was not saved")
        self.conversation.load_state_dict(state)

    def copy_state(self) -> State | None:
        """The conversation's state after closing its turn; None if there is none, or no memory for a copy."""
        try:
            return self.conversation.state_dict()
        except H2OStreamError:
            return None
        except (MemoryError, RuntimeError) as error:
            if not means_out_of_memory(error):
                raise
            return None
