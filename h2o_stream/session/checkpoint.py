"""The last committed version of a conversation: its turns, and the states to which it can return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from h2o_stream.base.logs import Log
from h2o_stream.cache.state import State, logs_of
from h2o_stream.engine.sampling import RngState
from h2o_stream.session.conversation_state import ConversationState
from h2o_stream.session.sessions import MAX_STATES, Session
from h2o_stream.session.transcript import Entry

_MAX_STATES_BYTES = 256 * 2**20
"""Memory for the states of an unsaved conversation. One state is always kept."""


@dataclass(frozen=True)
class Checkpoint:
    """A committed conversation.

    Attributes:
        rng_state: state of the sampler when the next turn began.
        session: session that saves the conversation; None if it is not saved.
        unsaved: the turns of a conversation without a session.
        states: states after the last turns, by turn number. With a named session, only those that could not be
            written.
    """

    metadata: ConversationState
    rng_state: RngState
    session: Session | None = None
    unsaved: Log[Entry] = field(default_factory=Log)
    states: Mapping[int, State] = field(default_factory=dict)

    @property
    def entries(self) -> Log[Entry]:
        """The turns so far, without those that were undone."""
        return self.unsaved if self.session is None else self.session.transcript.entries

    @property
    def last_turn(self) -> int:
        """Number of the last turn; 0 if there is none."""
        return self.entries[-1].turn if self.entries else 0

    def state(self, turn: int) -> State | None:
        """The state after a turn; None if it is no longer available. Raises DataError if it is damaged."""
        if turn in self.states or self.session is None:
            return self.states.get(turn)
        return self.session.state(turn)

    def with_turn(self, metadata: ConversationState, entry: Entry, state: State | None) -> Checkpoint:
        """A copy with one more unsaved turn."""
        states = dict(self.states) if state is None else {**self.states, entry.turn: state}
        while len(states) > 1 and (len(states) > MAX_STATES or _num_bytes(states) > _MAX_STATES_BYTES):
            del states[next(iter(states))]
        return replace(self, metadata=metadata, unsaved=self.unsaved.append(entry), states=states)

    def release(self) -> None:
        """Close the session, for other processes."""
        if self.session is not None:
            if self.session.automatic:
                self.session.save_states(self.states)
            self.session.close()


def _num_bytes(states: Mapping[int, State]) -> int:
    arrays = {id(array): array.nbytes for state in states.values() for array in state.values()}  # some are shared
    logs = [id(state[name]) for state in states.values() for name in logs_of(state)]  # which are the conversation's
    return sum(arrays.values()) - sum(arrays[log] for log in logs)
