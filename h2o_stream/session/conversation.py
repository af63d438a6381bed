"""A conversation of any length: says things to the engine and reports what came back, turn by turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace

import psutil
from torch import Tensor

from h2o_stream.cache.state import sealed, unsealed
from h2o_stream.engine.engine import Engine
from h2o_stream.engine.events import Finished, PrefillProgress, Token
from h2o_stream.errors import H2OStreamError
from h2o_stream.session.template import ChatTemplate, Prompt
from h2o_stream.session.turn import Turn
from h2o_stream.session.work import Work


@dataclass(frozen=True)
class Passage:
    """Tokens of the stream that belong together: from index `start` up to `stop`, of turn `turn`."""

    turn: int
    start: int
    stop: int


class Conversation:
    """Turns on one engine. The system prompt is fed once, with the first turn, and never evicted.

    Args:
        engine: with an empty cache.
        system: the system prompt; None leaves it to the model's template.
        stops: strings that end a reply, beside those of the engine's sampling config.

    Attributes:
        turns: that were begun.
        passages: what each turn has put into the stream, in order.
        pins: texts that are never evicted, beside the system prompt.

    Raises:
        ConfigError: the system prompt leaves the window too little room.
        UnsupportedModelError: the chat template cannot be used turn by turn.
    """

    def __init__(self, engine: Engine, system: str | None = None, stops: Sequence[str] = ()) -> None:
        self.engine = engine
        self._stops = stops
        self._process = psutil.Process()
        self._begin(system)

    def _begin(self, system: str | None) -> None:
        self.turns = 0
        self.passages: list[Passage] = []
        self.pins: list[str] = []
        self.system = system
        self._template = ChatTemplate(self.engine.tokenizer, system, self.engine.end_tokens)
        self._opened = self._ended = False
        self.engine.pin(self._template.opening("").pinned)

    def _restart(self, system: str | None) -> None:
        self.engine.reset()
        self.engine.cache.unpin()
        self._begin(system)

    def reset(self, system: str | None = None) -> None:
        """Forget everything but the system prompt, which the next turn feeds again.

        Args:
            system: another system prompt; None keeps the one there is.

        Raises:
            ConfigError: the system prompt leaves the window too little room; nothing has changed then.
        """
        if system is None:
            self._restart(self.system)
            return
        with self._unless_it_fails():
            self._restart(system)

    def say(self, text: str) -> Iterator[PrefillProgress | Token | Turn]:
        """One turn: feed what the user says, then reply.

        Yields:
            The engine's events as they come, then the finished `Turn`. When the iterator is closed early,
            everything yielded so far is in the cache and the next turn goes on from there.
        """
        text, prompt = self._prompt(text)
        self.turns += 1
        work, pieces = Work(), list[str]()
        for event in self._feed(prompt):
            if isinstance(event, Finished):
                yield self._turn(text, pieces, work, event)
                return
            work.prompt_tokens, work.prefill_s = event.done, event.elapsed_s
            yield event
        for reply in self.engine.decode(self._stops):
            pieces.append(reply.text)
            if isinstance(reply, Finished):
                yield self._turn(text, pieces, work, reply)
                return
            work.new_tokens, work.decode_s = work.new_tokens + 1, reply.elapsed_s
            self._ended = reply.id in self.engine.end_tokens
            self._note_passage()
            yield reply

    def tell(self, text: str, reply: str) -> Iterator[PrefillProgress | Finished]:
        """Feed a turn that was: what the user said and what came back. Nothing is drawn.

        Yields:
            The engine's events; `Finished` if it did not come to the end.
        """
        _, prompt = self._prompt(text)
        self.turns += 1
        yield from self._feed(self._answered(prompt, reply))

    def pin(self, text: str, reply: str = "I will keep that in mind.") -> Iterator[PrefillProgress | Finished]:
        """Feed a text as the user's and never evict it.

        Raises:
            ConfigError: it would leave the window too little room; nothing was fed.
        """
        text, prompt = self._prompt(text)
        start = self.engine.counts.seen
        self.engine.cache.pin(start + prompt.pinned, start + len(prompt.tokens))
        self.pins.append(text)
        self.turns += 1
        yield from self._feed(self._answered(prompt, reply))

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of everything there is to go on from after a turn, exactly, as safetensors takes it.

        Raises:
            H2OStreamError: nothing was said yet, or the last step was cut off halfway.
        """
        told = {
            "turns": self.turns,
            "passages": [astuple(passage) for passage in self.passages],
            "pins": self.pins,
            "system": self.system,
            "opened": self._opened,
            "ended": self._ended,
        }
        return self.engine.state_dict() | {"conversation": sealed(told)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state, in place of what there is; what the model says next is what it would have said.

        Raises:
            H2OStreamError: the state belongs to another model, dtype or policy, or is damaged; nothing has changed
                then.
        """
        with self._unless_it_fails():
            self._load(state)

    def _load(self, state: Mapping[str, Tensor]) -> None:
        told = unsealed(state, "conversation")
        try:
            system, turns, pins = told["system"], int(told["turns"]), [str(pin) for pin in told["pins"]]
            passages = [Passage(*map(int, passage)) for passage in told["passages"]]
            opened, ended = bool(told["opened"]), bool(told["ended"])
        except (KeyError, TypeError, ValueError) as error:
            raise H2OStreamError("the state of the conversation is damaged") from error
        self._restart(system)
        self.engine.load_state_dict(state)
        self.turns, self.pins, self.passages, self._opened, self._ended = turns, pins, passages, opened, ended

    @contextmanager
    def _unless_it_fails(self) -> Iterator[None]:
        """Whatever is done inside the block is undone if it fails."""
        before, system = None, self.system
        with suppress(H2OStreamError):  # nothing was said yet, or the last step was cut off
            before = self.state_dict()
        try:
            yield
        except H2OStreamError:
            self._restart(system)
            if before is not None:
                self._load(before)
            raise

    def _prompt(self, text: str) -> tuple[str, Prompt]:
        text = text.encode("utf-8", "replace").decode()
        if self._opened:
            return text, self._template.following(text, self._ended)
        prompt = self._template.opening(text)
        self.engine.pin(prompt.pinned)
        return text, prompt

    def _answered(self, prompt: Prompt, reply: str) -> Prompt:
        return Prompt([*prompt.tokens, *self._template.reply(reply)], prompt.pinned)

    def _feed(self, prompt: Prompt) -> Iterator[PrefillProgress | Finished]:
        """Once the pinned tokens are in, the conversation is open, even if the rest is interrupted."""
        start = self.engine.counts.seen
        for event in self.engine.prefill(prompt.tokens):
            if isinstance(event, Finished) and not self._opened:
                self.engine.reset()
            elif isinstance(event, PrefillProgress):
                self._opened = self._opened or event.done > prompt.pinned
                self._ended = event.done == event.total and prompt.tokens[-1] in self.engine.end_tokens
                self._note_passage(start)
            yield event

    def _note_passage(self, start: int | None = None) -> None:
        """What was fed since `start`, or since the last call, belongs to this turn."""
        if start is not None and (not self.passages or self.passages[-1].turn != self.turns):
            self.passages.append(Passage(self.turns, start, start))
        self.passages[-1] = replace(self.passages[-1], stop=len(self.engine.tokens))

    def _turn(self, prompt: str, pieces: list[str], work: Work, finished: Finished) -> Turn:
        return Turn(
            number=self.turns,
            prompt=prompt,
            text="".join(pieces),
            work=work,
            counts=self.engine.counts,
            rss_bytes=self._process.memory_info().rss,
            finish=finished.reason,
            detail=finished.detail,
            beyond_context=self.engine.beyond_context,
        )
