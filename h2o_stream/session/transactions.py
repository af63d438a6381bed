"""Changes of a conversation that happen as a whole or not at all.

`Transactions.checkpoint` is what was committed last. A change works on the conversation first, then on the session on
disk if there is one, and replaces the checkpoint at its end. A change that is cut off before that is rolled back: the
conversation returns to the last turn of the checkpoint, at once or, if that is cut off too, before the next change.
A checkpoint reads its turns from its session. So a change whose line is on the disk has happened, and rolling back
completes it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from h2o_stream.errors import DataError, H2OStreamError, means_out_of_memory
from h2o_stream.session.checkpoint import Checkpoint, State
from h2o_stream.session.conversation import Conversation
from h2o_stream.session.running import Running
from h2o_stream.session.sessions import Session
from h2o_stream.session.transcript import Entry, Header, Kind

_Events = TypeVar("_Events", bound=Generator[object, None, None])


class Transactions:
    """A conversation, and what was committed of it.

    Args:
        conversation: with nothing said yet.
        header: see `Keeper`.

    Attributes:
        conversation: as it is now.
        checkpoint: what was committed last.
    """

    def __init__(self, conversation: Conversation, header: Header) -> None:
        self.conversation = conversation
        self.checkpoint = Checkpoint(conversation.facts, self.draws)
        self._header = header
        self._running = Running()
        self._opened: Session | None = None  # whatever happens, only committing it may keep its lock

    @property
    def draws(self) -> Tensor:
        """State of the random draws."""
        return self.conversation.engine.sampler.state

    @draws.setter
    def draws(self, state: Tensor) -> None:
        self.conversation.engine.sampler.state = state

    @property
    def header(self) -> Header:
        """What the conversation belongs to."""
        return replace(self._header, system=self.conversation.system)

    @property
    def committed(self) -> bool:
        """Whether the conversation is at the checkpoint."""
        return self.conversation.facts == self.checkpoint.facts and not self.conversation.torn

    def close(self) -> None:
        """Let other processes have the session; the conversation goes on in memory."""
        try:
            self._running.end()
        finally:
            self.discard_opened()
            checkpoint, self._opened = self.checkpoint, None
            self.checkpoint = replace(checkpoint, session=None, unsaved=tuple(checkpoint.entries))
            if checkpoint.session is not None:
                checkpoint.session.close()

    # a change

    def prepare(self) -> None:
        """End the turn under way, and roll back what was not rolled back yet. Every change begins with this."""
        self._running.end()
        self.discard_opened()
        self.roll_back()
        checkpoint = replace(self.checkpoint, draws=self.draws)
        turn = checkpoint.last_turn
        if turn and checkpoint.session is None and turn not in checkpoint.states and self.committed:
            state = self.copied_state()  # it was left behind with a session, say
            checkpoint = checkpoint if state is None else replace(checkpoint, states={**checkpoint.states, turn: state})
        self.checkpoint = checkpoint

    def begin(self, events: _Events) -> _Events:
        """Prepare a change that goes on while its events are read; whatever is called next closes it."""
        self.prepare()
        return self._running.begin(events)

    def open_session(self, name: str, create: bool) -> Session:
        """Open a session for the change under way, other than the one that is open.

        Raises:
            ConfigError, DataError: see `Session`.
        """
        session = self.checkpoint.session
        if session is not None and session.name == name:
            raise DataError(f"session {name} is the one that is open; take another name")
        self._opened = Session(name, create=create)
        return self._opened

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """A block that changes the conversation and commits; what it leaves uncommitted is rolled back."""
        session = self.checkpoint.session
        try:
            yield
        finally:
            self.discard_opened()
            self.roll_back()
            if session is not None and session is not self.checkpoint.session:
                session.close()

    def discard_opened(self) -> None:
        """Leave the session that was opened last, and nothing of it if it is new, unless it was committed or kept."""
        if self._opened is not None and self._opened is not self.checkpoint.session:
            self._opened.discard()
            self._opened = None

    # its end

    def keep_opened(self) -> None:
        """Leave the session that was opened last as it is; the conversation does not go on in it."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def commit_session(self, session: Session) -> None:
        """Commit the conversation as it is now, with all its turns in this session."""
        self.checkpoint = Checkpoint(self.conversation.facts, self.draws, session)

    def commit_up_to(self, turn: int) -> None:
        """Commit the conversation as it is now, with the turns up to this one; 0 for none."""
        old = self.checkpoint
        unsaved = tuple(entry for entry in old.unsaved if entry.turn <= turn)
        states = {number: state for number, state in old.states.items() if number <= turn}
        self.checkpoint = Checkpoint(self.conversation.facts, self.draws, old.session, unsaved, states)

    def commit_turn(self, text: str, reply: str, kind: Kind, finish: str) -> None:
        """Commit the turn under way, unless it is committed already.

        Raises:
            DataError: it could not be saved, or not all of it; it is committed all the same.
        """
        if self.committed:
            return
        state = self.copied_state()  # ends the turn, so the facts are final afterwards
        checkpoint, facts = self.checkpoint, self.conversation.facts
        if not facts.starts or facts.starts[-1][0] != facts.turns:  # nothing was fed
            self.checkpoint = replace(checkpoint, facts=facts)
            return
        if kind == "pinned" and facts.pins == checkpoint.facts.pins:  # cut off before its end
            kind = "told"
        entry = Entry(facts.turns, text, reply, kind, finish)
        if checkpoint.session is None:
            self.checkpoint = checkpoint.with_turn(facts, entry, state)
            return
        try:
            checkpoint.session.add(entry, state, self.header)
        except DataError:
            states = {} if state is None else {entry.turn: state}
            self.checkpoint = replace(checkpoint, facts=facts, states=states)
            raise
        self.checkpoint = replace(checkpoint, facts=facts, states={})

    def roll_back(self) -> None:
        """Return to the checkpoint; if its state is not known any more, the conversation is torn until it is reset."""
        if self.committed:
            return
        checkpoint = self.checkpoint
        try:
            self.go_back(checkpoint.last_turn)
        except H2OStreamError:
            self.conversation.tear()
            return
        if self.conversation.turns == checkpoint.facts.turns:
            self.draws = checkpoint.draws  # otherwise the change is on disk, and has come to its end now
        self.checkpoint = replace(checkpoint, facts=self.conversation.facts)

    def go_back(self, turn: int) -> None:
        """Make the conversation what it was after a turn of the checkpoint; 0 for before the first. Commits nothing.

        Raises:
            H2OStreamError: the state after that turn is not known any more, or is damaged; nothing has changed then.
        """
        checkpoint = self.checkpoint
        if not turn:
            header = checkpoint.session and checkpoint.session.transcript.header
            self.conversation.restart(header.system if header else checkpoint.facts.system)
            return
        state = checkpoint.state(turn)
        if state is None:
            raise H2OStreamError(
                f"what came after turn {turn} cannot be taken back: its state is too old or was not saved"
            )
        self.conversation.load_state_dict(state)

    def copied_state(self) -> State | None:
        """The state of the conversation, whose turn ends here; None if there is none, or no memory for a copy."""
        try:
            return self.conversation.state_dict()
        except H2OStreamError:
            return None
        except (MemoryError, RuntimeError) as error:
            if not means_out_of_memory(error):
                raise
            return None
