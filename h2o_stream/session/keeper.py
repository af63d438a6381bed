"""Keeps a conversation: what was said, and the states of its last turns, in memory or in a session on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from torch import Tensor

from h2o_stream.engine.events import Finished, PrefillProgress, Token
from h2o_stream.errors import DataError, H2OStreamError
from h2o_stream.session.conversation import Conversation
from h2o_stream.session.sessions import STATES_KEPT, Entry, Header, Kind, Session
from h2o_stream.session.turn import Turn

_STATES_BYTES = 256 * 2**20
"""Memory for the states of a conversation that is not saved; one is always kept."""

State = dict[str, Tensor]


class NoFitError(H2OStreamError):
    """A session's state cannot be gone on from: it belongs to another model, dtype or policy, or is lost."""


class Keeper:
    """A conversation whose turns can be taken back, branched and taken up again.

    Args:
        conversation: with nothing said yet.
        header: what it belongs to, for the sessions it is saved in; its system prompt is the conversation's.

    Attributes:
        session: where it is saved; None for nowhere.
    """

    def __init__(self, conversation: Conversation, header: Header) -> None:
        self.conversation = conversation
        self.session: Session | None = None
        self._header = header
        self._entries: list[Entry] = []
        self._states: dict[int, State] = {}

    def close(self) -> None:
        """Let other processes have the session."""
        if self.session is not None:
            self.session.__exit__()
        self.session = None

    @property
    def entries(self) -> list[Entry]:
        """The turns so far, less those that were taken back."""
        return self._entries if self.session is None else self.session.transcript.entries

    def header(self) -> Header:
        """What the conversation belongs to."""
        return replace(self._header, system=self.conversation.system)

    # turns

    def say(self, text: str) -> Iterator[PrefillProgress | Token | Turn]:
        """See `Conversation.say`; a turn is kept before it is reported, and says so if it could not be."""
        for event in self.conversation.say(text):
            if isinstance(event, Turn) and event.work.prompt_tokens:
                try:
                    self._keep(Entry(event.number, event.prompt, event.text, finish=event.finish))
                except DataError as error:
                    event = replace(event, detail=" ".join(filter(None, (event.detail, str(error)))))
            yield event

    def tell(self, text: str, reply: str) -> Iterator[PrefillProgress | Finished]:
        """See `Conversation.tell`."""
        yield from self._fed(self.conversation.tell(text, reply), text, reply, "told")

    def pin(self, text: str) -> Iterator[PrefillProgress | Finished]:
        """See `Conversation.pin`."""
        yield from self._fed(self.conversation.pin(text), text, "", "pinned")

    def _fed(
        self, events: Iterator[PrefillProgress | Finished], text: str, reply: str, kind: Kind
    ) -> Iterator[PrefillProgress | Finished]:
        finish = "stop"
        for event in events:
            if isinstance(event, Finished):
                finish = event.reason
            yield event
        self._keep(Entry(self.conversation.turns, text, reply, kind, finish))

    def _keep(self, entry: Entry) -> None:
        state = None
        with suppress(H2OStreamError):  # cut off halfway, or nothing was fed
            state = self.conversation.state_dict()
        if self.session is not None:
            if self.session.transcript.header is None:
                self.session.begin(self.header())
            self.session.add(entry, state)
            return
        self._entries.append(entry)
        if state is not None:
            self._states[entry.turn] = state
        while len(self._states) > 1 and (len(self._states) > STATES_KEPT or self._bytes() > _STATES_BYTES):
            del self._states[next(iter(self._states))]

    def _bytes(self) -> int:
        return sum(tensor.nbytes for state in self._states.values() for tensor in state.values())

    # back and sideways

    def reset(self, system: str | None = None) -> None:
        """See `Conversation.reset`."""
        self.conversation.reset(system)
        if self.session is not None:
            self.session.begin(self.header())
        self._entries, self._states = [], {}

    def undo(self, count: int = 1) -> list[Entry]:
        """Take back the last turns.

        Returns:
            What was taken back.

        Raises:
            H2OStreamError: there are not so many, or what was before them is not known any more.
        """
        entries = list(self.entries)
        if not 1 <= count <= len(entries):
            raise H2OStreamError(f"{count} turns cannot be taken back, there are {len(entries)}")
        rest, gone = entries[:-count], entries[-count:]
        if rest:
            state = self._state(rest[-1].turn)
            if state is None:
                raise H2OStreamError(f"turns before the last {STATES_KEPT - 1} cannot be taken back")
            self.conversation.load_state_dict(state)
        else:
            self.conversation.reset()
        turn = rest[-1].turn if rest else 0
        if self.session is not None:
            self.session.undo(turn)
        else:
            self._entries = rest
            self._states = {number: state for number, state in self._states.items() if number <= turn}
        return gone

    def _state(self, turn: int) -> State | None:
        return self._states.get(turn) if self.session is None else self.session.state(turn)

    def again(self) -> str:
        """Take back the last turn in order to say it again; the random draws go on, so that the reply is another.

        Returns:
            What the user said.

        Raises:
            H2OStreamError: nothing was said, or what was before is not known any more.
        """
        if not self.entries or self.entries[-1].kind != "said":
            raise H2OStreamError("the last turn has no reply that could be given again")
        sampler = self.conversation.engine.sampler
        draws = sampler.state
        prompt = self.undo()[0].prompt
        sampler.state = draws
        return prompt

    # sessions

    def save(self, name: str) -> None:
        """Save a copy as the session `name`.

        Raises:
            ConfigError, DataError: see `Session`.
        """
        self._copied(name).__exit__()

    def fork(self, name: str) -> None:
        """Go on in a copy called `name`; where it was saved before stays as it is.

        Raises:
            ConfigError, DataError: see `Session`.
        """
        self._go_on(self._copied(name))

    def _copied(self, name: str) -> Session:
        if self.session is not None:
            return self.session.copied_to(name)
        session = Session(name)
        if session.transcript.lines:
            session.__exit__()
            raise H2OStreamError(f"there is a session {name} already; take another name")
        if self._entries:
            session.begin(self.header())
        for entry in self._entries:
            session.add(entry, self._states.get(entry.turn))
        return session

    def open(self, name: str) -> bool:
        """Go on with the session `name`, or begin it.

        Returns:
            Whether there was one.

        Raises:
            ConfigError, DataError: see `Session`.
            NoFitError: its state cannot be gone on from, but `retell` can; nothing has changed.
        """
        session = Session(name)
        try:
            if session.transcript.entries:
                state = session.state(session.transcript.entries[-1].turn)
                if state is None:
                    raise H2OStreamError("its last state is lost")
                self.conversation.load_state_dict(state)
            else:
                self.conversation.reset()
        except H2OStreamError as error:
            session.__exit__()
            raise NoFitError(f"session {name} cannot be gone on from where it was: {error}") from error
        self._go_on(session)
        return bool(session.transcript.lines)

    def retell(self, name: str) -> Iterator[PrefillProgress | Finished]:
        """Go on with the session `name` by feeding its whole transcript again, where its state does not fit.

        Yields:
            Events of all its turns, one after the other; ends early if one of them does.

        Raises:
            ConfigError, DataError: see `Session`.
        """
        self._go_on(session := Session(name))
        header, entries = session.transcript.header, list(session.transcript.entries)
        self.reset(header.system if header else None)
        for entry in entries:
            complete = True
            for event in self.pin(entry.prompt) if entry.kind == "pinned" else self.tell(entry.prompt, entry.text):
                complete = isinstance(event, PrefillProgress)
                yield event
            if not complete:
                return

    def _go_on(self, session: Session) -> None:
        self.close()
        self.session, self._entries, self._states = session, [], {}
