"""A conversation of any length: says things to the engine and reports what came back, turn by turn.

All that a conversation is beside its stream of tokens is in its `Facts`. A turn states them before it feeds anything,
and `Conversation._settle` makes them fit what was fed, however the turn ended. So nothing is half done between two
events; only a forward that is cut off leaves the stream torn, and known as such.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

import psutil
from torch import Tensor

from h2o_stream.engine.engine import TORN, Engine
from h2o_stream.engine.events import Finished, PrefillProgress, Token
from h2o_stream.errors import H2OStreamError
from h2o_stream.session.facts import Facts, Passage, Pinning, facts_of
from h2o_stream.session.running import Running
from h2o_stream.session.template import ChatTemplate, Prompt
from h2o_stream.session.turn import Turn
from h2o_stream.session.work import Work

Turning = Generator[PrefillProgress | Token | Turn, None, None]
Feeding = Generator[PrefillProgress | Finished, None, None]


def plain(text: str) -> str:
    """A text as it is fed: without surrogates."""
    return text.encode("utf-8", "replace").decode()


class Conversation:
    """Turns on one engine. The system prompt is fed once, with the first turn, and never evicted.

    One turn is under way at a time: whatever is called next closes it.

    Args:
        engine: with an empty cache.
        system: the system prompt; None leaves it to the model's template.
        stops: strings that end a reply, beside those of the engine's sampling config.

    Attributes:
        facts: all that it is beside the stream.

    Raises:
        ConfigError: the system prompt leaves the window too little room.
        UnsupportedModelError: the chat template cannot be used turn by turn.
    """

    def __init__(self, engine: Engine, system: str | None = None, stops: Sequence[str] = ()) -> None:
        self.engine = engine
        self._stops = stops
        self._process = psutil.Process()
        self._running = Running()
        self.facts = Facts(system, self._template(system))
        self.engine.pin(self.facts.template.opening("").pinned)

    @property
    def turns(self) -> int:
        """How many were begun."""
        return self.facts.turns

    @property
    def system(self) -> str | None:
        """The system prompt; None leaves it to the model's template."""
        return self.facts.system

    @property
    def pins(self) -> list[str]:
        """Texts that are never evicted, beside the system prompt."""
        return list(self.facts.pins)

    @property
    def passages(self) -> list[Passage]:
        """What each turn has put into the stream, in order and without a gap."""
        return self.facts.passages(len(self.engine.tokens))

    @property
    def torn(self) -> bool:
        """Whether a step was cut off halfway: then only `reset` and `load_state_dict` help."""
        return self.engine.torn or self.facts.torn

    def tear(self) -> None:
        """Nothing but `reset` and `load_state_dict` from here on: what there is does not belong together."""
        self.facts = replace(self.facts, torn=True)

    def _template(self, system: str | None) -> ChatTemplate:
        return ChatTemplate(self.engine.tokenizer, system, self.engine.end_tokens)

    def reset(self, system: str | None = None) -> None:
        """Forget everything but the system prompt, which the next turn feeds again.

        Args:
            system: another system prompt; None keeps the one there is.

        Raises:
            ConfigError: the system prompt leaves the window too little room; nothing has changed then.
        """
        self.restart(self.system if system is None else system)

    def restart(self, system: str | None) -> None:
        """Forget everything; the next turn feeds this system prompt, None for the template's own.

        Raises:
            ConfigError: see `reset`.
        """
        self._running.end()
        if system != self.system:
            with self._atomic():
                self._restart(system)
            return
        try:
            self._restart(system)
        except BaseException:
            self._restart(system)  # it had room before: all of it rather than half
            raise

    def _restart(self, system: str | None, turns: int = 0) -> None:
        template = self._template(system)
        pinned = template.opening("").pinned
        self.tear()
        self.engine.reset()
        self.engine.unpin()
        self.engine.pin(pinned)
        self.facts = Facts(system, template, turns)

    def say(self, text: str) -> Turning:
        """One turn: feed what the user says, then reply.

        Yields:
            The engine's events as they come, then the finished `Turn`. When the iterator is closed early,
            everything yielded so far is in the cache and the next turn goes on from there; but an opening that did not
            come to the user's words is forgotten.

        Raises:
            H2OStreamError: the stream is torn.
        """
        return self._running.begin(self._say(text))

    def _say(self, text: str) -> Turning:
        text, work, pieces = plain(text), Work(), list[str]()
        with closing(self._feed(self._prompt(text))) as events:
            for event in events:
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
            yield reply

    def tell(self, text: str, reply: str) -> Feeding:
        """Feed a turn that was: what the user said and what came back. Nothing is drawn.

        Yields:
            The engine's events; `Finished` if it did not come to the end.

        Raises:
            H2OStreamError: the stream is torn.
        """
        return self._running.begin(self._tell(plain(text), reply))

    def _tell(self, text: str, reply: str) -> Feeding:
        yield from self._feed(self._answered(self._prompt(text), reply))

    def pin(self, text: str, reply: str = "I will keep that in mind.") -> Feeding:
        """Feed a text as the user's and never evict it; one that is not fed to its end is not pinned.

        Raises:
            ConfigError: it would leave the window too little room; nothing was fed.
            H2OStreamError: the stream is torn.
        """
        return self._running.begin(self._pin(plain(text), reply))

    def _pin(self, text: str, reply: str) -> Feeding:
        prompt, start = self._prompt(text), len(self.engine.tokens)
        pinning = Pinning(text, start + prompt.pinned, start + len(prompt.tokens))
        yield from self._feed(self._answered(prompt, reply), pinning)

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of everything there is to go on from after a turn, exactly, as safetensors takes it.

        Raises:
            H2OStreamError: nothing was said yet, or the last step was cut off halfway.
        """
        self._running.end()
        self._settle()
        if self.torn:
            raise H2OStreamError("the last step was cut off halfway; there is no state to save")
        return self.engine.state_dict() | self.facts.state_dict(len(self.engine.tokens))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state, in place of what there is; what the model says next is what it would have said.

        Raises:
            H2OStreamError: the state belongs to another model, dtype or policy, or is damaged; nothing has changed
                then.
        """
        self._running.end()
        facts = facts_of(state, self._template)
        with self._atomic():
            self.tear()
            self.engine.load_state_dict(state)
            self.facts = facts

    @contextmanager
    def _atomic(self) -> Iterator[None]:
        """Replace the stream in the block; if that fails or is cut off, everything is as it was before."""
        self._settle()
        facts, torn, draws = self.facts, self.torn, self.engine.sampler.state
        before = self.engine.state_dict() if self.engine.tokens and not torn else None
        try:
            yield
        except BaseException:
            self.tear()
            if before is not None:
                self.engine.load_state_dict(before)
            elif not torn:
                self._restart(facts.system)
            self.engine.sampler.state = draws
            self.facts = replace(facts, torn=torn)
            raise

    def _prompt(self, text: str) -> Prompt:
        self._settle()
        if self.torn:
            raise H2OStreamError(TORN)
        template, tokens = self.facts.template, self.engine.tokens
        if tokens:
            return template.following(text, ended=tokens[-1] in self.engine.end_tokens)
        prompt = template.opening(text)
        prompt = replace(prompt, pinned=min(prompt.pinned, len(prompt.tokens) - 1))
        self.engine.pin(prompt.pinned)
        return prompt

    def _answered(self, prompt: Prompt, reply: str) -> Prompt:
        return Prompt([*prompt.tokens, *self.facts.template.reply(reply)], prompt.pinned)

    def _feed(self, prompt: Prompt, pinning: Pinning | None = None) -> Feeding:
        number, before = self.facts.turns + 1, self.facts
        try:
            starts = (*before.starts, (number, len(self.engine.tokens)))
            self.facts = replace(before, turns=number, starts=starts, pinning=pinning)
            if pinning is not None:
                self.engine.cache.pin(pinning.start, pinning.stop)
            for event in self.engine.prefill(prompt.tokens):
                if isinstance(event, Finished):
                    self._settle()
                    self.facts = replace(self.facts, turns=number)
                yield event
        finally:
            self._settle()

    def _settle(self) -> None:
        """Make the facts fit what was fed, after a turn that ended in any way; cut off itself, it can be repeated."""
        facts, fed = self.facts, len(self.engine.tokens)
        if self.torn:
            return
        if 0 < fed <= self.engine.opening:  # without all of the system prompt there is nothing to go on from
            self._restart(facts.system, facts.turns - 1)
            return
        if facts.pinning is not None:
            if facts.pinning.stop > fed:
                self.engine.cache.unpin(facts.pinning.start, facts.pinning.stop)
            else:
                facts = replace(facts, pins=(*facts.pins, facts.pinning.text))
            facts = replace(facts, pinning=None)
        if facts.starts and facts.starts[-1][1] == fed:
            facts = replace(facts, turns=facts.turns - 1, starts=facts.starts[:-1])
        self.facts = facts

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
