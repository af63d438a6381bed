"""The last committed version of a conversation, and the states after its last turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from h2o_stream.session.metadata import Metadata
from h2o_stream.session.sessions import MAX_STATES, Session
from h2o_stream.session.transcript import Entry

_MAX_STATES_BYTES = 256 * 2**20
"""Memory for the states of an unsaved conversation. One state is always kept."""

State = dict[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A committed conversation.

    Attributes:
        metadata: of the conversation.
        rng_state: of the sampler when the next turn began.
        session: where the conversation is saved; None if it is not.
        unsaved: the turns of a conversation without a session.
        states: after the last turns, by turn number. With a session, only those that could not be written.
    """

    metadata: Metadata
    rng_state: Tensor
    session: Session | None = None
    unsaved: tuple[Entry, ...] = ()
    states: Mapping[int, State] = field(default_factory=dict)

    @property
    def entries(self) -> list[Entry]:
        """The turns so far, without those that were undone."""
        return list(self.unsaved) if self.session is None else self.session.transcript.entries

    @property
    def last_turn(self) -> int:
        """Number of the last turn; 0 if there is none."""
        return self.entries[-1].turn if self.entries else 0

    def state(self, turn: int) -> State | None:
        """The state after a turn; None if it is no longer available.

        Raises:
            DataError: it is damaged.
        """
        if turn in self.states or self.session is None:
            return self.states.get(turn)
        return self.session.state(turn)

    def with_turn(self, metadata: Metadata, entry: Entry, state: State | None) -> Checkpoint:
        """A copy with one more unsaved turn."""
        states = dict(self.states) if state is None else {**self.states, entry.turn: state}
        while len(states) > 1 and (len(states) > MAX_STATES or _num_bytes(states) > _MAX_STATES_BYTES):
            del states[next(iter(states))]
        return replace(self, metadata=metadata, unsaved=(*self.unsaved, entry), states=states)


def _num_bytes(states: Mapping[int, State]) -> int:
    return sum(tensor.nbytes for state in states.values() for tensor in state.values())
