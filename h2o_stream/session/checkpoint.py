"""What was committed of a conversation last, and the states of its last turns: enough to return to any of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from h2o_stream.session.facts import Facts
from h2o_stream.session.sessions import STATES_KEPT, Session
from h2o_stream.session.transcript import Entry

_STATES_BYTES = 256 * 2**20
"""Memory for the states of a conversation that is not saved; one is always kept."""

State = dict[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A conversation after its last turn, or after whatever else changed it.

    Attributes:
        facts: of the conversation.
        draws: state of the random draws when the next turn began.
        session: where it is saved; None for nowhere.
        unsaved: the turns of a conversation that is not saved.
        states: after the last turns, by their numbers; with a session only those that could not be written.
    """

    facts: Facts
    draws: Tensor
    session: Session | None = None
    unsaved: tuple[Entry, ...] = ()
    states: Mapping[int, State] = field(default_factory=dict)

    @property
    def entries(self) -> list[Entry]:
        """The turns so far, less those that were taken back."""
        return list(self.unsaved) if self.session is None else self.session.transcript.entries

    @property
    def last_turn(self) -> int:
        """Number of the last turn; 0 if there is none."""
        return self.entries[-1].turn if self.entries else 0

    def state(self, turn: int) -> State | None:
        """What there was after a turn; None if that is not known any more.

        Raises:
            DataError: it is damaged.
        """
        if turn in self.states or self.session is None:
            return self.states.get(turn)
        return self.session.state(turn)

    def with_turn(self, facts: Facts, entry: Entry, state: State | None) -> Checkpoint:
        """With one more turn, in memory."""
        states = dict(self.states) if state is None else {**self.states, entry.turn: state}
        while len(states) > 1 and (len(states) > STATES_KEPT or _num_bytes(states) > _STATES_BYTES):
            del states[next(iter(states))]
        return replace(self, facts=facts, unsaved=(*self.unsaved, entry), states=states)


def _num_bytes(states: Mapping[int, State]) -> int:
    return sum(tensor.nbytes for state in states.values() for tensor in state.values())
