"""A conversation of any length: sends messages to the engine and yields what comes back, turn by turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from itertools import takewhile
from typing import Any
from weakref import proxy

from h2o_stream.base.resources import replace_surrogates
from h2o_stream.cache.state import Array, State
from h2o_stream.config import THINKING_VARIABLES, THINKING_WORDS, RecallConfig, RecallMode
from h2o_stream.engine.engine import Engine
from h2o_stream.engine.events import Finished, PrefillProgress, Token
from h2o_stream.engine.grammar import Grammar
from h2o_stream.errors import H2OStreamError
from h2o_stream.recall.form import compose, forbidden, over_piece
from h2o_stream.recall.passage import Candidate, Recalled
from h2o_stream.recall.recall import Recall
from h2o_stream.session.conversation_state import PendingPin, load_conversation_state
from h2o_stream.session.messages import (
    Tool,
    UserTurn,
    change_question,
    parse_turn,
    question_of,
    text_of,
)
from h2o_stream.session.reply import GrowingReply
from h2o_stream.session.template import ChatTemplate, Prompt, inserted, place_alone
from h2o_stream.session.turn import ActiveTurn, Turn
from h2o_stream.session.turn_stream import FeedEvents, TurnStream

ReplyEvents = Generator[Recalled | PrefillProgress | Token | Turn, None, None]


class Conversation(TurnStream):
    """A conversation on one engine. The system prompt is fed once, with the first turn, and never evicted.

    Only one turn is active at a time: any other call closes it.

    Args:
        engine: an engine with an empty cache.
        system: the system prompt; None leaves it to the model's template.
        stops: strings that end a reply, in addition to those of the engine's sampling config.
        recall: ``auto`` reads evicted passages again before a reply, if the user's message asks for them, ``wide``
            also in other words.
        thinking: see `switch_thinking`; None leaves it to the model's template.
        tools: JSON schemas of tools, which the template describes before the first turn. They are never evicted.
        effort: how much the model is to think, see `ChatTemplate`.
        template: template of all this, if it is made already.

    Attributes:
        metadata: everything besides the token stream.
        recall: finds evicted passages.

    Raises:
        ConfigError: the system prompt and the tools leave too little room in the window.
        DataError: a tool is not a schema.
        UnsupportedModelError: the chat template cannot be used turn by turn, or omits tools.
    """

    def __init__(
        self,
        engine: Engine,
        system: str | None = None,
        stops: Sequence[str] = (),
        recall: RecallConfig | RecallMode = "off",
        thinking: bool | None = None,
        tools: Sequence[Tool] = (),
        effort: str | None = None,
        template: ChatTemplate | None = None,
    ) -> None:
        super().__init__(engine, system, thinking, tools, effort, template)
        config = recall if isinstance(recall, RecallConfig) else RecallConfig(recall)
        weak = proxy(self)  # else only the garbage collector would end a conversation and its cache
        self.recall = Recall(
            engine,
            config,
            lambda turn: weak.metadata.turn_tokens(turn, len(engine.tokens)),
            lambda: place_alone(ChatTemplate(engine.tokenizer, None, engine.end_tokens)),
        )
        self._stops = stops
        self._rules: Mapping[str, Any] | str | None = None
        self.active = ActiveTurn()

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end a reply."""
        return *self.engine.sampling.stop, *self._stops

    def switch_thinking(self, thinking: bool) -> None:
        """Let the model think before it answers, or not, from the next turn on.

        Raises:
            H2OStreamError: the chat template has no switch for it. Nothing has changed.
        """
        if self.metadata.template.thinking_switch is None:
            switches = ", ".join((*THINKING_VARIABLES, *(off for _, off in THINKING_WORDS)))
            raise H2OStreamError(f"the model's chat template has no switch for thinking ({switches})")
        self._thinking = thinking
        self.metadata = replace(self.metadata, template=self._template(self.system))
        self.follow(self._rules)

    def follow(self, rules: Mapping[str, Any] | str | None) -> None:
        """Let replies follow a JSON schema, or a grammar as `Grammar` takes it; None for any text. Thinking is free.

        Raises ConfigError or DataError as `Grammar`; then nothing has changed.
        """
        engine, thinking = self.engine, self.metadata.template.free_thinking
        made = rules and Grammar(engine.tokenizer, engine.end_tokens, engine.served.vocabulary, rules, thinking)
        self._rules, engine.grammar = rules, made or None

    def reset(self, system: str | None = None) -> None:
        """Forget everything but the system prompt, which is fed again with the next turn. None keeps the current
        prompt.

        Raises:
            ConfigError: the system prompt leaves too little room in the window. Nothing has changed.
        """
        self.restart(self.system if system is None else system)

    def restart(self, system: str | None) -> None:
        """Forget everything, as in `reset`. The next turn feeds this system prompt, None for the template's own."""
        self.active.close()
        self.engine.cache.check_pin(self._template(system).opening_size)
        try:
            self._restart(system)
        except BaseException:
            self._restart(system)  # the prompt fits, so finish rather than stop halfway
            raise
        self.recall.truncate(0)

    def say(self, text: UserTurn, begun: str = "") -> ReplyEvents:
        """One turn: feed the user's message, a text or messages with results of tools, then generate a reply, which
        continues the text `begun`.

        Yields:
            `Recalled` if passages are read again, the engine's events as they come, then the finished `Turn`. If the
            iterator is closed early, everything yielded so far is in the cache, and the next turn continues from there.
            A first turn that is closed before the user's message is reached is forgotten.

        Raises:
            H2OStreamError: the stream is torn.
            DataError, UnsupportedModelError: see `ChatTemplate.next_turn`. Nothing was fed.
        """
        return self.active.start(self._say(parse_turn(text), replace_surrogates(begun)))

    def _say(self, message: UserTurn, begun: str) -> ReplyEvents:
        text, prompt, template = text_of(message), self._prompt(message), self.metadata.template
        passages = self.recall.find(question_of(message))
        if passages.candidates or passages.gone:
            yield passages
        reply = GrowingReply(text, template.markers, passages.candidates)
        with self._indexing(text, reply.answer):
            if passages.pieces and not begun and self.engine.grammar is None:
                yield from self._say_in_pieces(message, passages.pieces, reply)
                return
            recalled = passages.pieces[::-1] or passages.candidates  # the best passage comes last
            if recalled:
                prompt = self._with_recalled(prompt, recalled, message)
            if begun:
                prompt = template.begin(prompt, begun)
            reply.answer.append(begun)
            ended = yield from self._reply(prompt, reply, bool(recalled), self.engine.sampling.max_tokens)
            yield reply.finish(self.metadata.turns, ended, self.engine)

    def _say_in_pieces(self, message: UserTurn, pieces: Sequence[Candidate], reply: GrowingReply) -> ReplyEvents:
        """A turn whose reply is made of replies over the pieces of a text, each of which is read by itself.

        In the stream of the conversation a small model would repeat its reply to the first piece, in later turns too.
        """
        ended: Finished | None = None
        try:
            with self._aside():
                for number, piece in enumerate(pieces):
                    self._restart(self.system)
                    prompt = self._prompt(change_question(message, partial(over_piece, piece)))
                    if ended is not None:
                        reply.end_round(ended)
                    share = (self.engine.sampling.max_tokens - reply.num_tokens) // (len(pieces) - number)
                    ended = yield from self._reply(prompt, reply, True, max(share, 1), enough=share // 2)
                    if ended.cut or ended.reason not in ("stop", "length"):
                        break
        except GeneratorExit:
            with closing(self._tell(message, "".join(reply.answer))) as events:
                # Where the engine would wait for the turns of others, nothing more is fed.
                deque(takewhile(lambda event: isinstance(event, PrefillProgress), events), maxlen=0)
            raise
        assert ended is not None, "there is a piece"
        turn = reply.finish(0, ended, self.engine)
        yield from self._tell(message, turn.text)
        yield replace(turn, number=self.metadata.turns, counts=self.engine.counts)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """What is said inside the block is no part of the conversation."""
        state = self.state_dict()
        try:
            yield
        finally:
            draws = self.engine.sampler.rng_state
            self.load_state_dict(state)
            self.engine.sampler.rng_state = draws

    def _tell(self, message: UserTurn, reply: str) -> Generator[PrefillProgress, None, None]:
        """Feed a turn whose reply was made aside, to its end."""
        prompt, engine = self._with_reply(self._prompt(message), reply, own=True), self.engine
        should_stop, engine.should_stop = engine.should_stop, lambda: False
        try:
            with closing(self._feed(prompt)) as events:
                for event in events:
                    if not isinstance(event, Finished):
                        yield event
        finally:
            engine.should_stop = should_stop

    def _reply(
        self, prompt: Prompt, reply: GrowingReply, recalled: bool, max_tokens: int, enough: int | None = None
    ) -> Generator[PrefillProgress | Token, None, Finished]:
        """Feed a prompt and generate at most so much of the reply to it; from `enough` tokens on up to the end of a
        sentence. Returns how it ended.
        """
        thinking = prompt.num_thinking is not None
        reply.begin_round(thinking)
        with closing(self._feed(prompt)) as events:
            for event in events:
                if isinstance(event, Finished):
                    return event
                if isinstance(event, PrefillProgress):
                    reply.add_progress(event)
                yield event
        template, start = self.metadata.template, len(self.engine.tokens) - (prompt.num_thinking or 0)
        sampler = self.engine.sampler
        sampler.focused = recalled or self.engine.grammar is not None
        sampler.forbidden = self._labels if recalled else {}
        budget, end = self.engine.sampling.thinking_budget, self.engine.sampling.thinking_message
        sampler.forced = template.thinking_end(end) if reply.thinks_beyond(budget) else []
        for generated in self.engine.decode(self._stops, template.marker_tokens, thinking, max_tokens):
            if isinstance(generated, Finished):
                return generated
            if isinstance(generated, Token):  # an engine that is stepped with others waits before it
                generated = reply.add_token(generated)
                if generated.thinking is not None:
                    self.metadata = replace(self.metadata, thinking=range(start, generated.seen))
                if reply.thinks_beyond(budget) and not sampler.forced:
                    sampler.forced = template.thinking_end(end)
            yield generated
            if enough is not None and reply.round_tokens >= enough and reply.ends_sentence:
                return Finished("length")
        raise AssertionError("a reply always ends with Finished")

    def feed_turn(self, text: UserTurn, reply: str, own: bool = False) -> FeedEvents:
        """Feed a past turn: the user's message, as in `say`, and the reply to it, in the model's `own` words or a
        client's. Nothing is generated.

        Yields:
            The engine's events. The last one is `Finished` if the turn could not be fed completely.

        Raises:
            H2OStreamError: the stream is torn.
        """
        return self.active.start(self._feed_turn(parse_turn(text), reply, own=own))

    def _feed_turn(self, message: UserTurn, reply: str, pin: bool = False, own: bool = False) -> FeedEvents:
        text, prompt, start = text_of(message), self._prompt(message), len(self.engine.tokens)
        pending = PendingPin(text, start + prompt.num_pinned, start + len(prompt.tokens)) if pin else None
        with self._indexing(text, [] if pin else [reply]):
            yield from self._feed(self._with_reply(prompt, reply, own), pending)

    def pin(self, text: str, reply: str = "I will keep that in mind.") -> FeedEvents:
        """Feed a text as a user message and never evict it. A text that is not fed completely is not pinned.

        Raises:
            ConfigError: it would leave too little room in the window. Nothing was fed.
            H2OStreamError: the stream is torn.
        """
        return self.active.start(self._feed_turn(parse_turn(text), reply, pin=True))

    def state_dict(self) -> State:
        """A copy of the complete state after a turn, as arrays by name; bfloat16 numbers are uint16.

        Raises:
            H2OStreamError: nothing was said yet, or the last step was cut off halfway.
        """
        self.active.close()
        self._reconcile()
        if self.torn:
            raise H2OStreamError("the last step was cut off halfway; there is no state to save")
        self.metadata = self.metadata.marked()
        return self.engine.state_dict() | self.metadata.state_dict()

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Replace the conversation by a saved state. It continues exactly as it would have without the interruption.

        Raises:
            H2OStreamError: the state belongs to another model, dtype or policy, or is damaged. Nothing has changed.
        """
        self.active.close()
        metadata = load_conversation_state(state, self._template)
        self.engine.load_state_dict(state)
        self.metadata = replace(metadata, stream=self.engine.cache.stream_number)
        self.recall.truncate(metadata.turns)

    def _with_recalled(self, prompt: Prompt, recalled: Sequence[Candidate], message: UserTurn) -> Prompt:
        """The prompt of a message with the passages that are read again."""
        ended = self.engine.tokens[-1] in self.engine.end_tokens
        asking = change_question(message, partial(compose, recalled))
        composed = self.metadata.template.next_turn(asking, ended)
        return replace(composed, recalled=inserted(prompt.tokens, composed.tokens))

    @cached_property
    def _labels(self) -> dict[int, int]:
        return forbidden(self.engine.tokenizer)

    @contextmanager
    def _indexing(self, text: str, pieces: Sequence[str]) -> Iterator[None]:
        """Index the turn inside the block when it ends, also if it ends early, but not if it fails."""
        before = self.metadata.turns
        try:
            yield
        except GeneratorExit:
            self._index(text, pieces, before)
            raise
        self._index(text, pieces, before)

    def _index(self, text: str, pieces: Sequence[str], before: int) -> None:
        self._reconcile()
        metadata = self.metadata
        if not self.torn and metadata.last_start[0] == metadata.turns > before:
            self.recall.add(metadata.turns, text, "".join(pieces))
