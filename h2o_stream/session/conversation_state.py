"""Everything a conversation needs besides its token stream: one frozen object that is only replaced as a whole."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from h2o_stream.base.logs import NumberLog
from h2o_stream.cache.state import (
    Array,
    State,
    checksummed,
    decode_json,
    encode_json,
    load_log,
    log_state,
    verify_checksums,
)
from h2o_stream.errors import H2OStreamError
from h2o_stream.session.jsonl import check_type
from h2o_stream.session.template import ChatTemplate

_KEY = "conversation"
_CHECKSUMS = "conversation.checksums"
_STARTS, _THOUGHTS = "conversation.starts", "conversation.thoughts"


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

    `starts` has number and first token index of each turn that has tokens, one after the other, `thoughts` start and
    stop of the thinking of each earlier turn that has any. The ranges are indices of tokens: read again for the current
    turn, and its thinking so far. A system prompt of None is the template's.
    """

    system: str | None
    template: ChatTemplate = field(compare=False)
    turns: int = 0
    starts: NumberLog = field(default_factory=NumberLog)
    pins: tuple[str, ...] = ()
    pending_pin: PendingPin | None = None
    recalled: range = range(0)
    thinking: range = range(0)
    thoughts: NumberLog = field(default_factory=NumberLog)
    stream: int = 0

    def turn_spans(self, num_tokens: int) -> list[TurnSpan]:
        """The tokens of each turn in a stream of `num_tokens` tokens, in order and without gaps."""
        turns, starts = self.starts[::2], self.starts[1::2]
        return [TurnSpan(*span) for span in zip(turns, starts, [*starts[1:], num_tokens], strict=False)]

    def turn_tokens(self, turn: int, num_tokens: int) -> range:
        """The token indices of a turn; none if it has no tokens."""
        starts = self.starts
        place = 2 * bisect_left(range(len(starts) // 2), turn, key=lambda at: starts[2 * at])
        if place == len(starts) or starts[place] != turn:
            return range(0)
        return range(starts[place + 1], starts[place + 3] if place + 2 < len(starts) else num_tokens)

    @property
    def last_start(self) -> tuple[int, int]:
        """Number and first token index of the last turn that has tokens; -1 if none has."""
        return (self.starts[-2], self.starts[-1]) if self.starts else (-1, -1)

    @property
    def thought_ranges(self) -> list[range]:
        """The tokens of the thinking of each earlier turn that has any."""
        return list(map(range, self.thoughts[::2], self.thoughts[1::2]))

    def turn_over(self) -> ConversationState:
        """The state after the turn: nothing is marked as read again, and its thinking is that of an earlier turn."""
        thinking = self.thinking
        thoughts = self.thoughts.append((thinking.start, thinking.stop)) if thinking else self.thoughts
        return replace(self, recalled=range(0), thinking=range(0), thoughts=thoughts)

    def marked(self) -> ConversationState:
        """This state with marks in its logs, as `state_dict` needs it."""
        return replace(self, starts=self.starts.marked(), thoughts=self.thoughts.marked())

    def state_dict(self) -> State:
        """The metadata as arrays."""
        values = {"turns": self.turns, "pins": self.pins, "system": self.system}
        logs = log_state(_STARTS, self.starts) | log_state(_THOUGHTS, self.thoughts)
        return checksummed({_KEY: encode_json(values)}, _CHECKSUMS) | logs


def load_conversation_state(
    state: Mapping[str, Array], make_template: Callable[[str | None], ChatTemplate]
) -> ConversationState:
    """The metadata of a new stream from its `state_dict`; raises H2OStreamError if it is missing or damaged.

    `make_template` gets the system prompt.
    """
    verify_checksums(state, _CHECKSUMS)
    values = decode_json(state, _KEY)
    try:
        system, turns = check_type(values["system"], str | None), check_type(values["turns"], int)
        pins = tuple(check_type(pin, str) for pin in check_type(values["pins"], list))
        if "passages" in values:  # earlier versions
            starts = NumberLog([number for span in values["passages"] for number in span[:2]])
            thoughts = NumberLog([number for span in values.get("thoughts", ()) for number in span])
        else:
            starts, thoughts = load_log(state, _STARTS), load_log(state, _THOUGHTS)
        NumberLog([2 * turns])  # a number that `starts` can hold, with many to come
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise H2OStreamError("the state of the conversation is damaged") from error
    return ConversationState(system, make_template(system), turns, starts, pins, thoughts=thoughts)
