"""Keeps a conversation: what was said, and the states of its last turns, in memory or in a session on disk.

What belongs together is `_Kept`, replaced as a whole. A turn, and whatever else changes the conversation, is over when
it is kept. What is cut off before that is taken back: the conversation returns to the state after the turn that was
kept last, at once, or if even that is cut off, before anything else begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace

from torch import Tensor

from h2o_stream.engine.engine import TORN
from h2o_stream.engine.events import Finished, Token
from h2o_stream.errors import DataError, H2OStreamError, means_out_of_memory
from h2o_stream.session.conversation import Conversation, Facts, Feeding, Turning, plain
from h2o_stream.session.running import Running
from h2o_stream.session.sessions import STATES_KEPT, Entry, Header, Kind, Session
from h2o_stream.session.turn import Turn

_STATES_BYTES = 256 * 2**20
"""Memory for the states of a conversation that is not saved; one is always kept."""

State = dict[str, Tensor]


class NoFitError(H2OStreamError):
    """A session's state cannot be gone on from: it belongs to another model, dtype or policy, or is lost."""


@dataclass(frozen=True)
class _Kept:
    """What there was when a turn was kept last.

    Attributes:
        facts: of the conversation.
        draws: where the random draws had come to when the next turn began.
        session: where it is saved; None for nowhere.
        entries: its turns, of a conversation that is not saved; a session knows them.
        states: after its last turns, by their numbers; of one that is saved only what could not be written.
    """

    facts: Facts
    draws: Tensor
    session: Session | None = None
    entries: tuple[Entry, ...] = ()
    states: Mapping[int, State] = field(default_factory=dict)

    @property
    def turns(self) -> list[Entry]:
        """The turns so far, less those that were taken back."""
        return list(self.entries) if self.session is None else self.session.transcript.entries

    def state(self, turn: int) -> State | None:
        """What there was after a turn; None if that is not known any more.

        Raises:
            DataError: it is damaged.
        """
        if turn in self.states or self.session is None:
            return self.states.get(turn)
        return self.session.state(turn)

    def with_turn(self, facts: Facts, entry: Entry, state: State | None) -> _Kept:
        """With another turn, in memory."""
        states = dict(self.states) if state is None else {**self.states, entry.turn: state}
        while len(states) > 1 and (len(states) > STATES_KEPT or _bytes(states) > _STATES_BYTES):
            del states[next(iter(states))]
        return replace(self, facts=facts, entries=(*self.entries, entry), states=states)


class Keeper:
    """A conversation whose turns can be taken back, branched and taken up again.

    One turn is under way at a time: whatever is called next closes it.

    Args:
        conversation: with nothing said yet; from now on it is changed through the keeper alone.
        header: what it belongs to, for the sessions it is saved in; its system prompt is the conversation's.
    """

    def __init__(self, conversation: Conversation, header: Header) -> None:
        self.conversation = conversation
        self._header = header
        self._running = Running()
        self._kept = _Kept(conversation.facts, self._draws)
        self._opened: Session | None = None  # last; nothing may keep its lock but going on with it

    def close(self) -> None:
        """Let other processes have the session; the conversation itself goes on."""
        try:
            self._running.end()
        finally:
            kept = self._kept
            self._kept = replace(kept, session=None, entries=tuple(kept.turns))
            self._release(kept.session, self._opened)

    @property
    def session(self) -> Session | None:
        """Where it is saved; None for nowhere."""
        return self._kept.session

    @property
    def entries(self) -> list[Entry]:
        """The turns so far, less those that were taken back."""
        return self._kept.turns

    def header(self) -> Header:
        """What the conversation belongs to."""
        return replace(self._header, system=self.conversation.system)

    # all or nothing

    @property
    def _draws(self) -> Tensor:
        return self.conversation.engine.sampler.state

    @property
    def _is_kept(self) -> bool:
        return self.conversation.facts == self._kept.facts and not self.conversation.torn

    def _ready(self) -> None:
        """End the turn under way; what was cut off before is taken back now at the latest."""
        self._running.end()
        self._release(self._opened)
        self._take_back()
        kept = replace(self._kept, draws=self._draws)
        if kept.session is None and kept.entries and kept.entries[-1].turn not in kept.states and self._is_kept:
            state = self._copy()  # it was left behind with a session, say
            kept = kept if state is None else replace(kept, states={**kept.states, kept.entries[-1].turn: state})
        self._kept = kept

    def _take_back(self) -> None:
        """Return to what was kept last; if that is not known any more, the conversation is torn until it is reset."""
        if self._is_kept:
            return
        kept, conversation = self._kept, self.conversation
        try:
            if kept.turns:
                conversation.load_state_dict(self._state(kept.turns[-1].turn))
            else:
                header = kept.session and kept.session.transcript.header
                conversation.restart(header.system if header else kept.facts.system)
        except H2OStreamError:
            conversation.tear()
            return
        conversation.engine.sampler.state = kept.draws
        self._kept = replace(kept, facts=conversation.facts)

    def _atomically(self, change: Callable[[], None], session: Session | None = None) -> None:
        """Do something that is kept at its end; whatever cuts it off before, it was not done.

        Args:
            change: what to do.
            session: is closed unless it is the one to go on with then; so is the one before.
        """
        before = self.session
        try:
            change()
        except BaseException:
            self._take_back()
            raise
        finally:
            self._release(before, session)

    def _release(self, *sessions: Session | None) -> None:
        for session in sessions:
            if session is not None and session is not self.session:
                session.close()

    # turns

    def say(self, text: str) -> Turning:
        """See `Conversation.say`; a turn is kept before it is reported, and says so if it could not be.

        If the iterator is closed early, what was yielded is a turn that was interrupted. A turn that fails, or runs out
        of memory, is taken back.
        """
        self._ready()
        return self._running.begin(self._say(plain(text)))

    def _say(self, text: str) -> Turning:
        pieces = list[str]()
        try:
            with closing(self.conversation.say(text)) as events:
                for event in events:
                    if isinstance(event, Turn):
                        trouble = self._ended(text, event.text, "said", event.finish)
                        event = replace(event, detail=" ".join(filter(None, (event.detail, trouble))))
                    elif isinstance(event, Token):
                        pieces.append(event.text)
                    yield event
        except GeneratorExit:
            self._keep(text, "".join(pieces), "said", "interrupted")
            raise
        finally:
            self._take_back()

    def tell(self, text: str, reply: str) -> Feeding:
        """See `Conversation.tell`."""
        self._ready()
        return self._running.begin(self._fed(self.conversation.tell(text, reply), plain(text), reply, "told"))

    def pin(self, text: str) -> Feeding:
        """See `Conversation.pin`; one that is cut off is kept as told."""
        self._ready()
        return self._running.begin(self._fed(self.conversation.pin(text), plain(text), "", "pinned"))

    def _fed(self, events: Feeding, text: str, reply: str, kind: Kind) -> Feeding:
        trouble = ""
        try:
            with closing(events):
                for event in events:
                    if isinstance(event, Finished):
                        trouble = self._ended(text, reply, kind, event.reason)
                        event, trouble = replace(event, detail=" ".join(filter(None, (event.detail, trouble)))), ""
                    elif event.done == event.total:
                        trouble = self._ended(text, reply, kind, "stop")
                    yield event
        except GeneratorExit:
            self._keep(text, reply, kind, "interrupted")
            if not trouble:
                raise
        finally:
            self._take_back()
        if trouble:
            raise DataError(trouble)

    def _ended(self, text: str, reply: str, kind: Kind, finish: str) -> str:
        """Keep a turn that came to an end, or take it back if it was torn; what there is to say about that."""
        if self.conversation.torn:
            self._take_back()
            return "The conversation is as it was before this turn." if self._is_kept else TORN
        try:
            self._keep(text, reply, kind, finish)
        except DataError as error:
            return str(error)
        return ""

    def _keep(self, text: str, reply: str, kind: Kind, finish: str) -> None:
        """Keep a turn, unless it is kept already."""
        if self._is_kept:
            return
        state, kept, facts = self._copy(), self._kept, self.conversation.facts
        if not facts.starts or facts.starts[-1][0] != facts.turns:  # nothing was fed
            self._kept = replace(kept, facts=facts)
            return
        if kind == "pinned" and facts.pins == kept.facts.pins:  # cut off before its end
            kind = "told"
        entry = Entry(facts.turns, text, reply, kind, finish)
        if kept.session is None:
            self._kept = kept.with_turn(facts, entry, state)
            return
        try:
            kept.session.add(entry, state, self.header())
        except DataError:
            self._kept = replace(kept, facts=facts, states={} if state is None else {entry.turn: state})
            raise
        self._kept = replace(kept, facts=facts, states={})

    def _copy(self) -> State | None:
        """The state after a turn; None if there is nothing, or no memory for it."""
        try:
            return self.conversation.state_dict()
        except H2OStreamError:
            return None
        except (MemoryError, RuntimeError) as error:
            if not means_out_of_memory(error):
                raise
            return None

    # back and sideways

    def reset(self, system: str | None = None) -> None:
        """See `Conversation.reset`.

        Raises:
            DataError: the session cannot be written; nothing has changed then.
        """
        self._ready()
        self._atomically(lambda: self._reset(system))

    def _reset(self, system: str | None) -> None:
        self.conversation.reset(system)
        if self.session is not None:
            self.session.begin(self.header())
        self._kept = _Kept(self.conversation.facts, self._draws, self.session)

    def undo(self, count: int = 1) -> list[Entry]:
        """Take back the last turns.

        Returns:
            What was taken back.

        Raises:
            H2OStreamError: there are not so many, or what was before them is not known any more.
            DataError: the session cannot be written; nothing has changed then.
        """
        self._ready()
        entries = self.entries
        if not 1 <= count <= len(entries):
            raise H2OStreamError(f"{count} turns cannot be taken back, there are {len(entries)}")
        self._atomically(lambda: self._go_back(entries[:-count]))
        return entries[-count:]

    def _go_back(self, entries: list[Entry]) -> None:
        kept, turn = self._kept, entries[-1].turn if entries else 0
        if turn:
            self.conversation.load_state_dict(self._state(turn))
        else:
            self.conversation.reset()
        states = {number: state for number, state in kept.states.items() if number <= turn}
        if kept.session is not None:
            kept.session.undo(turn)
        rest = tuple(entries) if kept.session is None else ()
        self._kept = _Kept(self.conversation.facts, self._draws, kept.session, rest, states)

    def _state(self, turn: int) -> State:
        state = self._kept.state(turn)
        if state is None:
            raise H2OStreamError(
                f"what came after turn {turn} cannot be taken back: its state is too old or was not saved"
            )
        return state

    def again(self) -> str:
        """Take back the last turn in order to say it again; the random draws go on, so that the reply is another.

        Returns:
            What the user said.

        Raises:
            H2OStreamError: nothing was said, or what was before is not known any more.
        """
        self._ready()
        if not self.entries or self.entries[-1].kind != "said":
            raise H2OStreamError("the last turn has no reply that could be given again")
        draws = self._draws
        prompt = self.undo()[0].prompt
        self.conversation.engine.sampler.state = draws
        return prompt

    # sessions

    def save(self, name: str) -> None:
        """Save a copy as the session `name`.

        Raises:
            ConfigError, DataError: see `Session`, and when there is one of that name; nothing is left of it then.
        """
        self._copied(name).close()

    def fork(self, name: str) -> None:
        """Go on in a copy called `name`; where it was saved before stays as it is.

        Raises:
            ConfigError, DataError: see `save`.
        """
        session = self._copied(name)
        self._atomically(lambda: self._go_on_in(session), session)

    def _go_on_in(self, session: Session) -> None:
        self._kept = _Kept(self.conversation.facts, self._draws, session)

    def _other(self, name: str, create: bool) -> Session:
        if self.session is not None and self.session.name == name:
            raise DataError(f"session {name} is the one that is open; take another name")
        self._opened = Session(name, create=create)
        return self._opened

    def _copied(self, name: str) -> Session:
        self._ready()
        session = self._other(name, create=True)
        new = not session.transcript.lines
        try:
            if not new:
                raise DataError(f"there is a session {name} already; take another name")
            session.add_all(self.header(), self.entries, self._known_state)
        except BaseException:
            (session.remove if new else session.close)()
            raise
        return session

    def _known_state(self, turn: int) -> State | None:
        with suppress(DataError):
            return self._kept.state(turn)
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
        self._ready()
        session = self._other(name, create)
        there = bool(session.transcript.lines)
        self._atomically(lambda: self._take_up(session), session)
        return there

    def _take_up(self, session: Session) -> None:
        header, entries = session.transcript.header, session.transcript.entries
        try:
            if entries:
                state = session.state(entries[-1].turn)
                if state is None:
                    raise H2OStreamError("its last state is lost")
                self.conversation.load_state_dict(state)
            else:
                self.conversation.restart(header.system if header else self.conversation.system)
        except H2OStreamError as error:
            raise NoFitError(f"session {session.name} cannot be gone on from where it was: {error}") from error
        self._go_on_in(session)

    def retell(self, name: str) -> Feeding:
        """Go on with the session `name` by feeding its whole transcript again, where its state does not fit.

        Yields:
            Events of all its turns, one after the other. If one of them ends early, or the iterator is closed, the
            conversation and the session are as they were.

        Raises:
            ConfigError, DataError: see `Session`, and `Conversation.pin`; nothing has changed.
        """
        self._ready()
        return self._running.begin(self._retell(name))

    def _retell(self, name: str) -> Feeding:
        before, session, conversation = self.session, self._other(name, create=False), self.conversation
        try:
            header = session.transcript.header
            conversation.restart(header.system if header else None)
            told = _Kept(conversation.facts, self._draws)
            for entry in session.transcript.entries:
                pinned = entry.kind == "pinned"
                with closing(
                    conversation.pin(entry.prompt) if pinned else conversation.tell(entry.prompt, entry.text)
                ) as events:
                    for event in events:
                        if isinstance(event, Finished):
                            self._take_back()
                            yield event
                            return
                        yield event
                state, facts = self._copy(), conversation.facts
                told = told.with_turn(
                    facts, replace(entry, turn=facts.turns, kind="pinned" if pinned else "told"), state
                )
            session.add_all(self.header(), told.entries, told.states.get)
            self._kept = replace(told, facts=conversation.facts, session=session, entries=(), states={})
        finally:
            self._take_back()
            self._release(before, session)


def _bytes(states: Mapping[int, State]) -> int:
    return sum(tensor.nbytes for state in states.values() for tensor in state.values())
