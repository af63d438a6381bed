"""A conversation whose turns can be taken back, given again, branched, saved and taken up again.

How a change happens as a whole or not at all, and how a turn is taken back, is in `transactions`.
"""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import replace
from typing import TypeVar

from h2o_stream.engine.engine import TORN
from h2o_stream.engine.events import Finished, Token
from h2o_stream.errors import DataError, H2OStreamError
from h2o_stream.session.checkpoint import Checkpoint, State
from h2o_stream.session.conversation import Conversation, Feeding, Turning, plain
from h2o_stream.session.sessions import Session
from h2o_stream.session.transactions import Transactions
from h2o_stream.session.transcript import Entry, Header, Kind
from h2o_stream.session.turn import Turn

_End = TypeVar("_End", Turn, Finished)


class NoFitError(H2OStreamError):
    """A session's state cannot be gone on from: it belongs to another model, dtype or policy, or is lost."""


class Keeper:
    """Keeps a conversation: what was said, and the states of its last turns, in memory or in a session on disk.

    One turn is under way at a time: whatever is called next closes it.

    Args:
        conversation: with nothing said yet; from now on it is changed through the keeper alone.
        header: what it belongs to, for the sessions it is saved in; its system prompt is the conversation's.
    """

    def __init__(self, conversation: Conversation, header: Header) -> None:
        self.conversation = conversation
        self._transactions = Transactions(conversation, header)

    def close(self) -> None:
        """Let other processes have the session; the conversation itself goes on."""
        self._transactions.close()

    @property
    def session(self) -> Session | None:
        """Where it is saved; None for nowhere."""
        return self._transactions.checkpoint.session

    @property
    def entries(self) -> list[Entry]:
        """The turns so far, less those that were taken back."""
        return self._transactions.checkpoint.entries

    def header(self) -> Header:
        """What the conversation belongs to."""
        return self._transactions.header

    # turns

    def say(self, text: str) -> Turning:
        """See `Conversation.say`; a turn is committed before it is reported, and says so if it could not be saved.

        If the iterator is closed early, what was yielded is a turn that was interrupted. A turn that fails, or runs out
        of memory, is taken back.
        """
        return self._transactions.begin(self._say(plain(text)))

    def _say(self, text: str) -> Turning:
        pieces = list[str]()
        with self._transactions.atomic():
            try:
                with closing(self.conversation.say(text)) as events:
                    for event in events:
                        if isinstance(event, Turn):
                            event = _with_detail(event, self._ended(text, event.text, "said", event.finish))
                        elif isinstance(event, Token):
                            pieces.append(event.text)
                        yield event
            except GeneratorExit:
                self._transactions.commit_turn(text, "".join(pieces), "said", "interrupted")
                raise

    def tell(self, text: str, reply: str) -> Feeding:
        """See `Conversation.tell`.

        Raises:
            DataError: the turn is complete, but could not be saved, or not all of it.
        """
        return self._transactions.begin(self._feed_turn(plain(text), reply, "told"))

    def pin(self, text: str) -> Feeding:
        """See `Conversation.pin`; one that is cut off is kept as told.

        Raises:
            DataError: see `tell`.
        """
        return self._transactions.begin(self._feed_turn(plain(text), "", "pinned"))

    def _feed_turn(self, text: str, reply: str, kind: Kind) -> Feeding:
        with self._transactions.atomic():
            try:
                with closing(self._feed(text, reply, kind)) as events:
                    for event in events:
                        if isinstance(event, Finished):
                            event = _with_detail(event, self._ended(text, reply, kind, event.reason))
                        elif event.done == event.total and (trouble := self._ended(text, reply, kind, "stop")):
                            raise DataError(trouble)
                        yield event
            except GeneratorExit:
                self._transactions.commit_turn(text, reply, kind, "interrupted")
                raise

    def _feed(self, text: str, reply: str, kind: Kind) -> Feeding:
        return self.conversation.pin(text) if kind == "pinned" else self.conversation.tell(text, reply)

    def _ended(self, text: str, reply: str, kind: Kind, finish: str) -> str:
        """Commit a turn that came to an end, or take it back if it was torn; what there is to say about that."""
        if self.conversation.torn:
            self._transactions.roll_back()
            return "The conversation is as it was before this turn." if self._transactions.committed else TORN
        try:
            self._transactions.commit_turn(text, reply, kind, finish)
        except DataError as error:
            return str(error)
        return ""

    # back

    def reset(self, system: str | None = None) -> None:
        """See `Conversation.reset`.

        Raises:
            DataError: the session cannot be written; nothing has changed then.
        """
        self._transactions.prepare()
        with self._transactions.atomic():
            self.conversation.reset(system)
            if self.session is not None:
                self.session.begin(self.header())
            self._transactions.commit_up_to(0)

    def undo(self, count: int = 1) -> list[Entry]:
        """Take back the last turns.

        Returns:
            What was taken back.

        Raises:
            H2OStreamError: there are not so many, or what was before them is not known any more.
            DataError: the session cannot be written; nothing has changed then.
        """
        self._transactions.prepare()
        entries = self.entries
        if not 1 <= count <= len(entries):
            raise H2OStreamError(f"{count} turns cannot be taken back, there are {len(entries)}")
        turn = entries[-count - 1].turn if count < len(entries) else 0
        with self._transactions.atomic():
            self._transactions.go_back(turn)
            if self.session is not None:
                self.session.undo(turn)
            self._transactions.commit_up_to(turn)
        return entries[-count:]

    def again(self) -> str:
        """Take back the last turn in order to say it again; the random draws go on, so that the reply is another.

        Returns:
            What the user said.

        Raises:
            H2OStreamError: nothing was said, or what was before is not known any more.
        """
        self._transactions.prepare()
        if not self.entries or self.entries[-1].kind != "said":
            raise H2OStreamError("the last turn has no reply that could be given again")
        draws = self._transactions.draws
        prompt = self.undo()[0].prompt
        self._transactions.draws = draws
        return prompt

    # sessions

    def save(self, name: str) -> None:
        """Save a copy as the session `name`.

        Raises:
            ConfigError, DataError: see `Session`, and when there is one of that name; nothing is left of it then.
        """
        try:
            self._copied(name)
            self._transactions.keep_opened()
        finally:
            self._transactions.discard_opened()

    def fork(self, name: str) -> None:
        """Go on in a copy called `name`; where it was saved before stays as it is.

        Raises:
            ConfigError, DataError: see `save`.
        """
        with self._transactions.atomic():
            self._transactions.commit_session(self._copied(name))

    def _copied(self, name: str) -> Session:
        self._transactions.prepare()
        session = self._transactions.open_session(name, create=True)
        if session.transcript.lines:
            raise DataError(f"there is a session {name} already; take another name")
        session.add_all(self.header(), self.entries, self._known_state)
        return session

    def _known_state(self, turn: int) -> State | None:
        with suppress(DataError):
            return self._transactions.checkpoint.state(turn)
        return None

    def open(self, name: str, create: bool = True) -> bool:
        """Go on with the session `name`, or begin it.

        Args:
            name: of the session.
            create: begin it if there is none.

        Returns:
            Whether there was one.

        Raises:
            ConfigError, DataError: see `Session`; nothing has changed.
            NoFitError: its state cannot be gone on from, but `retell` can; nothing has changed.
        """
        self._transactions.prepare()
        with self._transactions.atomic():
            session = self._transactions.open_session(name, create)
            there = bool(session.transcript.lines)
            try:
                self._load(session)
            except H2OStreamError as error:
                raise NoFitError(f"session {name} cannot be gone on from where it was: {error}") from error
            self._transactions.commit_session(session)
        return there

    def _load(self, session: Session) -> None:
        header, entries = session.transcript.header, session.transcript.entries
        if not entries:
            self.conversation.restart(header.system if header else self.conversation.system)
            return
        state = session.state(entries[-1].turn)
        if state is None:
            raise H2OStreamError("its last state is lost")
        self.conversation.load_state_dict(state)

    def retell(self, name: str) -> Feeding:
        """Go on with the session `name` by feeding its whole transcript again, where its state does not fit.

        Yields:
            Events of all its turns, one after the other. If one of them ends early, or the iterator is closed, the
            conversation and the session are as they were.

        Raises:
            ConfigError, DataError: see `Session`, and `Conversation.pin`; nothing has changed.
        """
        return self._transactions.begin(self._retell(name))

    def _retell(self, name: str) -> Feeding:
        transactions, conversation = self._transactions, self.conversation
        with transactions.atomic():
            session = transactions.open_session(name, create=False)
            header = session.transcript.header
            conversation.restart(header.system if header else None)
            replayed = Checkpoint(conversation.facts, transactions.draws)
            for entry in session.transcript.entries:
                kind: Kind = "pinned" if entry.kind == "pinned" else "told"
                with closing(self._feed(entry.prompt, entry.text, kind)) as events:
                    for event in events:
                        if isinstance(event, Finished):
                            transactions.roll_back()
                            yield event
                            return
                        yield event
                state, facts = transactions.copied_state(), conversation.facts
                replayed = replayed.with_turn(facts, replace(entry, turn=facts.turns, kind=kind), state)
            session.add_all(self.header(), replayed.entries, replayed.states.get)
            transactions.commit_session(session)


def _with_detail(event: _End, trouble: str) -> _End:
    return replace(event, detail=" ".join(filter(None, (event.detail, trouble))))
