"""The stream of an engine as turns of a conversation: what is fed of them, and the metadata that say what it is.

Everything besides the tokens is in `TurnStream.metadata`, with the number of the stream that it describes. A turn
updates it before anything is fed, and `_reconcile` corrects it to what was actually fed, however the turn ended. So
both are consistent between any two events, unless a forward is cut off halfway.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

from h2o_stream.cache.protection import merged, without
from h2o_stream.engine.engine import TORN_MESSAGE, Engine
from h2o_stream.engine.events import Finished, PrefillProgress
from h2o_stream.errors import H2OStreamError
from h2o_stream.session.conversation_state import ConversationState, PendingPin, TurnSpan
from h2o_stream.session.messages import Tool, UserTurn, parse_tools
from h2o_stream.session.template import ChatTemplate, Prompt

FeedEvents = Generator[PrefillProgress | Finished, None, None]


class TurnStream:
    """The turns in an engine's stream; arguments, attributes and errors as for `Conversation`."""

    def __init__(
        self,
        engine: Engine,
        system: str | None,
        thinking: bool | None,
        tools: Sequence[Tool],
        effort: str | None,
        template: ChatTemplate | None,
    ) -> None:
        self.engine = engine
        self._thinking, self._tools, self._effort = thinking, parse_tools(tools), effort
        template = template or self._template(system)
        self.metadata = ConversationState(system, template, stream=engine.cache.stream_number)
        engine.pin(self.metadata.template.opening_size)

    @property
    def system(self) -> str | None:
        """The system prompt; None leaves it to the model's template."""
        return self.metadata.system

    @property
    def pins(self) -> list[str]:
        """Texts that are never evicted, besides the system prompt."""
        return list(self.metadata.pins)

    @property
    def turn_spans(self) -> list[TurnSpan]:
        """The tokens of each turn, in order and without gaps; none while the stream is torn."""
        return [] if self.torn else self.metadata.turn_spans(len(self.engine.tokens))

    @property
    def recalled(self) -> tuple[range, ...]:
        """Indices of tokens that were read again, as far as the cache may still hold them."""
        ranges = merged((*self.engine.cache.transient, self.metadata.recalled))
        for thought in self.thoughts:
            ranges = without(ranges, thought.start, thought.stop)
        return ranges

    @property
    def thoughts(self) -> tuple[range, ...]:
        """Indices of the tokens of the model's thinking."""
        return merged((*self.metadata.thought_ranges, self.metadata.thinking))

    @property
    def torn(self) -> bool:
        """Whether a step was cut off halfway. Then only `reset` and `load_state_dict` help."""
        return self.engine.torn or self.metadata.stream != self.engine.cache.stream_number

    def _template(self, system: str | None) -> ChatTemplate:
        engine = self.engine
        return ChatTemplate(engine.tokenizer, system, engine.end_tokens, self._thinking, self._tools, self._effort)

    def _restart(self, system: str | None, turns: int = 0) -> None:
        template = self._template(system)
        self.engine.reset()
        self.engine.unpin()
        self.engine.pin(template.opening_size)
        self.metadata = ConversationState(system, template, turns, stream=self.engine.cache.stream_number)

    def _prompt(self, message: UserTurn) -> Prompt:
        self._reconcile()
        if self.torn:
            raise H2OStreamError(TORN_MESSAGE)
        template, tokens = self.metadata.template, self.engine.tokens
        if tokens:
            return template.next_turn(message, ended=tokens[-1] in self.engine.end_tokens)
        prompt = template.first_turn(message)
        prompt = replace(prompt, num_pinned=min(prompt.num_pinned, len(prompt.tokens) - 1))
        self.engine.pin(prompt.num_pinned)
        return prompt

    def _with_reply(self, prompt: Prompt, reply: str, own: bool) -> Prompt:
        """The prompt of a past turn and the reply to it."""
        tokens = [*prompt.tokens, *self.metadata.template.reply(reply, prompt.num_thinking is not None, own)]
        return Prompt(tokens, prompt.num_pinned)

    def _feed(self, prompt: Prompt, pending_pin: PendingPin | None = None) -> FeedEvents:
        number, before = self.metadata.turns + 1, self.metadata
        try:
            start = len(self.engine.tokens)
            recalled = range(start + prompt.recalled.start, start + prompt.recalled.stop)
            starts = before.starts.append((number, start))
            self.metadata = replace(before, turns=number, starts=starts, pending_pin=pending_pin, recalled=recalled)
            if pending_pin is not None:
                self.engine.cache.pin(pending_pin.start, pending_pin.stop)
            for event in self.engine.prefill(prompt.tokens):
                if isinstance(event, Finished):
                    self._reconcile(ended=False)
                    self.metadata = replace(self.metadata, turns=number)
                yield event
        finally:
            self._reconcile(ended=False)

    def _reconcile(self, ended: bool = True) -> None:
        """Make the metadata match what was fed, however the last turn ended. Can be repeated if it is cut off.

        If the turn is over, what was read again for it and its thinking may go.
        """
        metadata, fed = self.metadata, len(self.engine.tokens)
        if self.torn:
            return
        if 0 < fed <= self.engine.pinned_prefix:  # the system prompt is incomplete, so nothing can follow it
            self._restart(metadata.system, metadata.turns - 1)
            return
        pending = metadata.pending_pin
        if pending is not None:
            if pending.stop > fed:
                self.engine.cache.unpin(pending.start, pending.stop)
            else:
                metadata = replace(metadata, pins=(*metadata.pins, pending.text))
            metadata = replace(metadata, pending_pin=None)
        if metadata.last_start[1] == fed:
            metadata = replace(metadata, turns=metadata.turns - 1, starts=metadata.starts.shortened(2))
        if ended:
            for served in filter(None, (metadata.recalled, metadata.thinking)):
                self.engine.cache.evict_first(served.start, min(served.stop, fed))
            metadata = metadata.turn_over()
        self.metadata = metadata
