"""A conversation with its history: turns can be undone, regenerated, branched, saved and resumed.

`transactions` makes each of these changes atomic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import TypeVar

from h2o_stream.base.logs import Log
from h2o_stream.base.resources import replace_surrogates
from h2o_stream.cache.state import State
from h2o_stream.engine.engine import TORN_MESSAGE
from h2o_stream.engine.events import Finished, Token
from h2o_stream.errors import DataError, H2OStreamError
from h2o_stream.session.conversation import Conversation, ReplyEvents
from h2o_stream.session.sessions import MAX_STATES, Session
from h2o_stream.session.transactions import NoStateError, ResumeError, Transactions
from h2o_stream.session.transcript import Entry, Header, Kind
from h2o_stream.session.turn import Turn
from h2o_stream.session.turn_stream import FeedEvents

_End = TypeVar("_End", Turn, Finished)


class ConversationHistory:
    """A conversation with its transcript and the states after its last turns, in memory or in a session on disk.

    Only one turn is active at a time: any other call closes it. From now on the conversation, a new one, must be
    changed through its history only. The header describes it in its sessions; its system prompt is the conversation's.
    """

    def __init__(self, conversation: Conversation, header: Header) -> None:
        self.conversation = conversation
        self._transactions = Transactions(conversation, header)

    def close(self) -> None:
        """Release the session for other processes. The conversation itself can continue."""
        self._transactions.close()

    @property
    def session(self) -> Session | None:
        """Where the conversation is saved; None if it is not."""
        return self._transactions.checkpoint.session

    @property
    def entries(self) -> Log[Entry]:
        """The turns so far, without those that were undone."""
        return self._transactions.checkpoint.entries

    def keep(self, start_session: Callable[[str], Session]) -> None:
        """Keep the conversation, once it has a turn, in the session that this makes of its first message."""
        self._transactions.start_session = start_session

    def earlier_states(self) -> Iterator[tuple[int, State]]:
        """The states after the turns before the last one, by turn, newest first, as far back as they are readable."""
        for entry in reversed(self.entries[-MAX_STATES:-1]):
            if (state := self._readable_state(entry.turn)) is None:
                return
            yield entry.turn, state

    def header(self) -> Header:
        """Describes the conversation, with its current system prompt."""
        return self._transactions.header

    # turns

    def say(self, text: str) -> ReplyEvents:
        """See `Conversation.say`. A turn is committed before it is yielded; `Turn.detail` says if it was not saved.

        If the iterator is closed early, what was yielded becomes an interrupted turn. A turn that fails or runs out of
        memory is rolled back.
        """
        return self._transactions.start(self._say(replace_surrogates(text)))

    def _say(self, text: str) -> ReplyEvents:
        pieces, thinking = list[str](), list[str]()
        with self._transactions.atomic():
            try:
                with closing(self.conversation.say(text)) as events:
                    for event in events:
                        if isinstance(event, Turn):
                            event = _with_detail(
                                event, self._end_turn(text, event.text, "said", event.finish, event.thinking)
                            )
                        elif isinstance(event, Token):
                            pieces.append(event.text)
                            thinking.append(event.thinking or "")
                        yield event
            except GeneratorExit:
                self._transactions.commit_turn(text, "".join(pieces), "said", "interrupted", "".join(thinking))
                raise

    def feed_turn(self, text: str, reply: str) -> FeedEvents:
        """See `Conversation.feed_turn`; raises DataError if the turn is complete, but could not be saved completely."""
        return self._transactions.start(self._feed_turn(replace_surrogates(text), reply, "told"))

    def pin(self, text: str) -> FeedEvents:
        """Pin a text, which is fed as a turn. A text that is cut off becomes an ordinary turn without a reply."""
        return self._transactions.start(self._feed_turn(replace_surrogates(text), "", "pinned"))

    def _feed_turn(self, text: str, reply: str, kind: Kind) -> FeedEvents:
        with self._transactions.atomic():
            try:
                with closing(self._feed(text, reply, kind)) as events:
                    for event in events:
                        if isinstance(event, Finished):
                            event = _with_detail(event, self._end_turn(text, reply, kind, event.reason))
                        elif event.done == event.total and (trouble := self._end_turn(text, reply, kind, "stop")):
                            raise DataError(trouble)
                        yield event
            except GeneratorExit:
                self._transactions.commit_turn(text, reply, kind, "interrupted")
                raise

    def _feed(self, text: str, reply: str, kind: Kind) -> FeedEvents:
        return self.conversation.pin(text) if kind == "pinned" else self.conversation.feed_turn(text, reply)

    def _end_turn(self, text: str, reply: str, kind: Kind, finish: str, thinking: str = "") -> str:
        """Commit a turn that has ended, or roll it back if it is torn. Returns a line for the user, or nothing."""
        if self.conversation.torn:
            self._transactions.roll_back()
            return "The conversation is as it was before this turn." if self._transactions.committed else TORN_MESSAGE
        try:
            self._transactions.commit_turn(text, reply, kind, finish, thinking)
        except DataError as error:
            return str(error)
        return ""

    # going back

    def reset(self, system: str | None = None) -> None:
        """See `Conversation.reset`. The next turn starts another automatic session; one that has a name goes on.

        Raises:
            DataError: the session cannot be written. Nothing has changed.
        """
        self._transactions.prepare()
        with self._transactions.atomic():
            self.conversation.reset(system)
            if self.session is not None and self.session.automatic:
                self._transactions.commit_session(None)
                return
            if self.session is not None:
                self.session.begin(self.header())
            self._transactions.commit_up_to(0)

    def undo(self, count: int = 1) -> list[Entry]:
        """Undo the last turns, and return them.

        Raises:
            H2OStreamError: there are fewer turns, or the state before them is no longer available.
            DataError: the session cannot be written. Nothing has changed.
        """
        self._transactions.prepare()
        entries = self.entries
        if not 1 <= count <= len(entries):
            raise H2OStreamError(f"cannot undo {count} turns, there are {len(entries)}")
        turn = entries[-count - 1].turn if count < len(entries) else 0
        with self._transactions.atomic():
            self._transactions.restore(turn)
            if self.session is not None:
                self.session.undo(turn)
            self._transactions.commit_up_to(turn)
        return entries[-count:]

    def rewind(self, turn: int) -> FeedEvents:
        """Return to an earlier turn whose state is no longer available: the turns up to it are fed again.

        Yields their events. If a turn ends early, or the iterator is closed, nothing has changed.

        Raises:
            DataError: the session cannot be written. Nothing has changed.
        """
        return self._transactions.start(self._rewind(turn))

    def _rewind(self, turn: int) -> FeedEvents:
        transactions, session = self._transactions, self.session
        entries = [entry for entry in self.entries if entry.turn <= turn]
        with transactions.atomic():
            self.conversation.restart(self.conversation.system)
            replayed = yield from transactions.replay(map(_told, entries))
            if replayed is None:
                return
            if session is None:
                transactions.checkpoint = replayed
                return
            in_memory = replayed.states if session.automatic else {}
            session.add_all(self.header(), replayed.entries, ({} if in_memory else replayed.states).get)
            transactions.checkpoint = replace(replayed, session=session, unsaved=Log(), states=in_memory)

    def regenerate(self) -> str:
        """Undo the last turn so that its message, which is returned, can be said again.

        The random generator continues, so the reply will differ.

        Raises:
            H2OStreamError: there is no reply, or the state before it is no longer available.
        """
        self._transactions.prepare()
        if not self.entries or self.entries[-1].kind != "said":
            raise H2OStreamError("the last turn has no reply to regenerate")
        rng_state = self._transactions.rng_state
        prompt = self.undo()[0].prompt
        self._transactions.rng_state = rng_state
        return prompt

    # sessions

    def save(self, name: str) -> None:
        """Save a copy as the session `name`.

        Raises:
            ConfigError, DataError: see `Session`; or a session of that name exists. Nothing is left behind.
        """
        try:
            self._save_copy(name)
            self._transactions.keep_opened()
        finally:
            self._transactions.discard_opened()

    def fork(self, name: str) -> None:
        """Continue in a copy called `name`, made as by `save`. The previous session, if any, stays as it is."""
        with self._transactions.atomic():
            self._transactions.commit_session(self._save_copy(name))

    def _save_copy(self, name: str) -> Session:
        self._transactions.prepare()
        session = self._transactions.open_session(name, create=True)
        if session.transcript.line_count:
            raise DataError(f"session {name} already exists; choose another name")
        session.add_all(self.header(), self.entries, self._readable_state)
        return session

    def _readable_state(self, turn: int) -> State | None:
        with suppress(DataError):
            return self._transactions.checkpoint.state(turn)
        return None

    def open(self, name: str, create: bool = True) -> bool:
        """Resume the session `name`, or start it. Returns whether it existed.

        Raises:
            ConfigError, DataError: see `Session`. Nothing has changed.
            ResumeError: its state cannot be loaded, but `replay` may work. Nothing has changed.
        """
        self._transactions.prepare()
        with self._transactions.atomic():
            session = self._transactions.open_session(name, create)
            existed = bool(session.transcript.line_count)
            try:
                self._load(session)
            except NoStateError:
                raise
            except H2OStreamError as error:
                raise ResumeError(f"session {name} cannot be resumed: {error}") from error
            self._transactions.commit_session(session)
        return existed

    def _load(self, session: Session) -> None:
        header, entries = session.transcript.header, session.transcript.entries
        if not entries:
            self.conversation.restart(header.system if header else self.conversation.system)
            return
        state = session.state(entries[-1].turn)
        if state is None:
            raise NoStateError("the state after its last turn is missing")
        self.conversation.load_state_dict(state)

    def replay(self, name: str) -> FeedEvents:
        """Resume the session `name` by feeding its transcript again, for when its state cannot be loaded.

        Yields the events of all turns. If a turn ends early, or the iterator is closed, the conversation and the
        session stay as they were.

        Raises:
            ConfigError, DataError: see `Session` and `Conversation.pin`. Nothing has changed.
        """
        return self._transactions.start(self._replay(name))

    def _replay(self, name: str) -> FeedEvents:
        transactions, conversation = self._transactions, self.conversation
        with transactions.atomic():
            session = transactions.open_session(name, create=False)
            header = session.transcript.header
            conversation.restart(header.system if header else None)
            replayed = yield from transactions.replay(_told(entry) for entry in session.transcript.entries)
            if replayed is None:
                return
            session.add_all(self.header(), replayed.entries, replayed.states.get)
            transactions.commit_session(session)

    # another cache or model

    def suspend(self) -> None:
        """Make sure that `resume` can bring the conversation back after its engine was closed.

        Raises:
            H2OStreamError: the state after the last turn is not available. Nothing has changed.
        """
        self._transactions.prepare()
        checkpoint = self._transactions.checkpoint
        if checkpoint.last_turn and checkpoint.state(checkpoint.last_turn) is None:
            raise H2OStreamError("the state after the last turn was not saved, so there would be no way back")

    def resume(self) -> None:
        """Bring the conversation back to its last turn after its engine was reopened."""
        self._transactions.roll_back()

    def continue_in(self, conversation: Conversation, header: Header) -> FeedEvents:
        """Feed the transcript to another conversation, a new one with this system prompt, and continue there, in the
        same session.

        Yields the events of all turns. If a turn ends early, or the iterator is closed, nothing has changed.

        Raises:
            ConfigError, DataError: see `replay`. Nothing has changed.
        """
        return self._transactions.start(self._continue_in(conversation, header))

    def _continue_in(self, conversation: Conversation, header: Header) -> FeedEvents:
        old, new = self._transactions.checkpoint, Transactions(conversation, header)
        checkpoint = yield from new.replay(old.entries)
        if checkpoint is None:
            return
        if old.session is None:
            new.checkpoint = checkpoint
        else:
            in_memory = checkpoint.states if old.session.automatic else {}
            on_disk = {} if in_memory else checkpoint.states
            old.session.add_all(new.header, checkpoint.entries, on_disk.get)
            self.conversation.recall.use(None)
            new.commit_session(old.session, in_memory)
        new.start_session = self._transactions.start_session
        self.conversation, self._transactions = conversation, new


def _told(entry: Entry) -> Entry:
    return entry if entry.kind == "pinned" else replace(entry, kind="told")


def _with_detail(event: _End, trouble: str) -> _End:
    return replace(event, detail=" ".join(filter(None, (event.detail, trouble))))
