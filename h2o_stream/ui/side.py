"""The conversation of one policy among several that answer the same turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from h2o_stream.engine.events import Finish, PrefillProgress, Token
from h2o_stream.recall.passage import Recalled
from h2o_stream.session.cliff import Cliff
from h2o_stream.session.messages import UserTurn
from h2o_stream.session.report import RunReport
from h2o_stream.session.turn import Turn
from h2o_stream.ui.format import format_bytes, format_speed
from h2o_stream.ui.start import LoadedConversation

Event = Recalled | PrefillProgress | Token | Turn


class Side:
    """The conversation of one policy: the reply so far, the last turn once it is finished, the last event with counts.

    `finish` says why the conversation ended.
    """

    def __init__(self, policy: str, loaded: LoadedConversation) -> None:
        self.policy, self.loaded, self.context = policy, loaded, loaded.conversation.engine.context
        self.text = ""
        self.turn: Turn | None = None
        self.finish: Finish | None = None
        self.report = RunReport()
        self.last: PrefillProgress | Token | Turn | None = None

    @property
    def eager(self) -> bool:
        """Whether its steps are the model's own, which are slower than native ones at any length."""
        return self.loaded.conversation.engine.cache.engine_note.startswith("eager")

    def say(self, prompt: UserTurn) -> Iterator[Event]:
        """One turn. Yields nothing once the conversation has ended."""
        self.text, self.turn = "", None
        if self.finish is not None:
            return
        for event in self.loaded.conversation.say(prompt):
            self.report.add_event(event)
            if not isinstance(event, Recalled):
                self.last = event
            if isinstance(event, Token):
                self.text += event.text
            elif isinstance(event, Turn):
                self.turn = event
                if event.finish in ("context", "oom", "interrupted"):
                    self.finish = event.finish
            yield event

    def read(self, cliff: Cliff) -> Iterator[PrefillProgress]:
        """Read the text before the cliff."""
        for event in cliff.read(self.loaded.conversation):
            self.report.add_event(event)
            self.last = event
            yield event
        self.report.end_turn()


def common_prefix(sides: Sequence[Side]) -> int:
    """Length of the common prefix of the replies."""
    pairs = zip(*(side.text for side in sides), strict=False)
    return len(list(takewhile(lambda pair: len(set(pair)) == 1, pairs)))


def verdict(sides: Sequence[Side], parted: str) -> str:
    """The comparison in one line, at its end; `parted` says where the replies differed first, if they did."""
    figures = ", ".join(
        f"{side.policy}{' (eager)' if side.eager else ''} {format_speed(side.report.total.decode_tok_s)} and {format_bytes(side.report.cache_bytes)}"
        for side in sides
    )
    past = "".join(
        f"; {side.policy} is {side.report.seen - side.context:,} tokens past its context of {side.context:,}"
        for side in sides
        if side.report.beyond_context and side.context
    )
    return f"{figures} (in turn on the same cores); {parted or 'the replies never differ'}{past}"
