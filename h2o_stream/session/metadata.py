"""What a conversation is beside its stream of tokens: one frozen object, only ever replaced as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field

from torch import Tensor

from h2o_stream.cache.state import checksummed, sealed, unsealed, verify
from h2o_stream.errors import H2OStreamError
from h2o_stream.session.template import ChatTemplate

_METADATA = "conversation"
_CHECKSUMS = "conversation.checksums"


@dataclass(frozen=True)
class Passage:
    """Tokens of the stream that belong together: from index `start` up to `stop`, of turn `turn`."""

    turn: int
    start: int
    stop: int


@dataclass(frozen=True)
class Pinning:
    """A text that is being pinned: it is to take the token indices from `start` up to `stop`."""

    text: str
    start: int
    stop: int


@dataclass(frozen=True)
class Facts:
    """All that a conversation is beside its stream.

    Attributes:
        system: the system prompt; None leaves it to the template.
        template: writes turns after it.
        turns: number of turns begun.
        starts: for each turn that has tokens, its number and the index of its first token.
        pins: texts that are never evicted.
        pinning: the text that the turn under way pins.
        torn: the facts do not belong to the stream, which was being replaced.
        stream: a different object for each stream.
    """

    system: str | None
    template: ChatTemplate = field(compare=False)
    turns: int = 0
    starts: tuple[tuple[int, int], ...] = ()
    pins: tuple[str, ...] = ()
    pinning: Pinning | None = None
    torn: bool = False
    stream: object = field(default_factory=object)

    def passages(self, num_tokens: int) -> list[Passage]:
        """What each turn has put into a stream of that many tokens, in order and without a gap."""
        stops = [*(start for _, start in self.starts[1:]), num_tokens]
        return [Passage(turn, start, stop) for (turn, start), stop in zip(self.starts, stops, strict=False)]

    def state_dict(self, num_tokens: int) -> dict[str, Tensor]:
        """The facts as tensors, to be saved beside a stream of that many tokens."""
        metadata = {
            "turns": self.turns,
            "passages": [astuple(passage) for passage in self.passages(num_tokens)],
            "pins": self.pins,
            "system": self.system,
        }
        return checksummed({_METADATA: sealed(metadata)}, _CHECKSUMS)


def facts_of(state: Mapping[str, Tensor], make_template: Callable[[str | None], ChatTemplate]) -> Facts:
    """The facts of a new stream from their `state_dict`; `make_template` gets the system prompt.

    Raises:
        H2OStreamError: they are missing or damaged.
    """
    verify(state, _CHECKSUMS)
    metadata = unsealed(state, _METADATA)
    try:
        system, turns, pins = metadata["system"], int(metadata["turns"]), tuple(map(str, metadata["pins"]))
        starts = tuple((int(turn), int(start)) for turn, start, _ in metadata["passages"])
    except (KeyError, TypeError, ValueError) as error:
        raise H2OStreamError("the state of the conversation is damaged") from error
    return Facts(system, make_template(system), turns, starts, pins)
