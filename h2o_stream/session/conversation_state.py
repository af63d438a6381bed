"""Everything a conversation needs besides its token stream: one frozen object that is only replaced as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field, replace

from h2o_stream.cache.state import Array, State, checksummed, decode_json, encode_json, verify_checksums
from h2o_stream.errors import H2OStreamError
from h2o_stream.session.template import ChatTemplate

_KEY = "conversation"
_CHECKSUMS = "conversation.checksums"


@dataclass(frozen=True)
class TurnSpan:
    """The tokens of one turn: indices `start` to `stop` of the stream, `stop` excluded."""

    turn: int
    start: int
    stop: int


@dataclass(frozen=True)
class PendingPin:
    """A text that is being pinned. It will take the token indices `start` to `stop`, `stop` excluded."""

    text: str
    start: int
    stop: int


@dataclass(frozen=True)
class ConversationState:
    """A conversation without its tokens, of the stream with this `H2OCache.stream_number` and no other.

    `starts` has number and first token index of each turn that has tokens. The ranges are indices of tokens: read again
    for the current turn, its thinking so far, and that of each earlier turn that has any. A system prompt of None is
    the template's.
    """

    system: str | None
    template: ChatTemplate = field(compare=False)
    turns: int = 0
    starts: tuple[tuple[int, int], ...] = ()
    pins: tuple[str, ...] = ()
    pending_pin: PendingPin | None = None
    recalled: range = range(0)
    thinking: range = range(0)
    thoughts: tuple[range, ...] = ()
    stream: int = 0

    def turn_spans(self, num_tokens: int) -> list[TurnSpan]:
        """The tokens of each turn in a stream of `num_tokens` tokens, in order and without gaps."""
        stops = [*(start for _, start in self.starts[1:]), num_tokens]
        return [TurnSpan(turn, start, stop) for (turn, start), stop in zip(self.starts, stops, strict=False)]

    def turn_tokens(self, num_tokens: int) -> dict[int, range]:
        """The same token indices by turn."""
        return {span.turn: range(span.start, span.stop) for span in self.turn_spans(num_tokens)}

    def turn_over(self) -> ConversationState:
        """After the turn: what was read again is no longer marked, and its thinking is that of an earlier turn."""
        thoughts = (*self.thoughts, self.thinking) if self.thinking else self.thoughts
        return replace(self, recalled=range(0), thinking=range(0), thoughts=thoughts)

    def state_dict(self, num_tokens: int) -> State:
        """The metadata as arrays, for a stream of `num_tokens` tokens."""
        values = {
            "turns": self.turns,
            "passages": [astuple(span) for span in self.turn_spans(num_tokens)],
            "pins": self.pins,
            "thoughts": [(thought.start, thought.stop) for thought in self.thoughts],
            "system": self.system,
        }
        return checksummed({_KEY: encode_json(values)}, _CHECKSUMS)


def load_conversation_state(
    state: Mapping[str, Array], make_template: Callable[[str | None], ChatTemplate]
) -> ConversationState:
    """The metadata of a new stream from its `state_dict`. `make_template` gets the system prompt.

    Raises:
        H2OStreamError: it is missing or damaged.
    """
    verify_checksums(state, _CHECKSUMS)
    values = decode_json(state, _KEY)
    try:
        system, turns, pins = values["system"], int(values["turns"]), tuple(map(str, values["pins"]))
        starts = tuple((int(turn), int(start)) for turn, start, _ in values["passages"])
        thoughts = tuple(range(int(start), int(stop)) for start, stop in values.get("thoughts", ()))  # old: without
    except (KeyError, TypeError, ValueError) as error:
        raise H2OStreamError("the state of the conversation is damaged") from error
    return ConversationState(system, make_template(system), turns, starts, pins, thoughts=thoughts)
