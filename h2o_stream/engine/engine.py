"""The engine: a model, its cache and a sampler. Prompts go in, events come out.

Every token is in the cache before its event is yielded. Between two events the engine can be abandoned, closed or told
to stop, and the stream continues with the next prefill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Never, Self

from h2o_stream.base.logs import NumberLog
from h2o_stream.base.memory import trim_heap
from h2o_stream.base.progress import ProgressCallback, ignore
from h2o_stream.cache.counts import CacheCounts
from h2o_stream.cache.state import Array, State
from h2o_stream.config import (
    PREFILL_STEP,
    AtContext,
    CacheConfig,
    EngineChoice,
    SamplingConfig,
    SpeculateMode,
)
from h2o_stream.engine.events import Finished, PrefillProgress, Token
from h2o_stream.engine.grammar import Grammar, Matcher
from h2o_stream.engine.logits import Logits
from h2o_stream.engine.sampling import Sampler
from h2o_stream.engine.served import StreamCache, serve
from h2o_stream.engine.speculation import Speculation
from h2o_stream.engine.state import read_state, state_of
from h2o_stream.engine.text import TextStream
from h2o_stream.errors import H2OStreamError, OutOfMemoryError, means_out_of_memory
from h2o_stream.models.turn_tokens import end_tokens

TORN_MESSAGE = "the last step was cut off halfway; reset the conversation to continue"


class Engine:
    """One endless stream of tokens through one model. A context manager that restores the model on exit.

    Attributes:
        tokens: ids of all tokens fed since the start, 4 bytes each.
        pinned_prefix: how many tokens at the start of the stream `pin` protects.
        prefill_step: prompt tokens per forward, see the function `prefill_step`.
        grammar: what replies must follow; None for any text.
        speculation: the guesses of its replies.

    Args:
        model: a causal language model of transformers.
        tokenizer: the tokenizer of the model.
        cache: which tokens are kept.
        sampling: how tokens are sampled.
        at_context: whether a cache with original positions continues past the model's trained context or stops.
        should_stop: called between tokens and between parts of a prompt. True ends the turn as ``interrupted``.
        engine: what runs a step, see `attach`.
        progress: receives the progress of preparations, see `attach`.
        sampling_defaults: our own defaults of this model, see `config.model_sampling`.
        speculate: whether what the conversation has said before is guessed, see `Speculation`.

    Raises:
        UnsupportedModelError, ConfigError: see `attach`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        cache: CacheConfig | None = None,
        sampling: SamplingConfig | None = None,
        at_context: AtContext = "continue",
        should_stop: Callable[[], bool] = lambda: False,
        engine: EngineChoice = "auto",
        progress: ProgressCallback = ignore,
        sampling_defaults: Mapping[str, float] = MappingProxyType({}),
        speculate: SpeculateMode = "auto",
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._serve = partial(serve, model, cache, engine, progress)
        self.served = self._serve()
        self.sampling = sampling or SamplingConfig()
        self._sampling_defaults = sampling_defaults
        self.sampler = Sampler(self.sampling, self.served.generation, sampling_defaults)
        self.at_context = at_context
        self.should_stop = should_stop
        self.pinned_prefix = 0
        self.grammar: Grammar | None = None
        self.prefill_step = self.served.prefill_step
        self.tokens = NumberLog()
        self.end_tokens = end_tokens(self.served.generation, tokenizer)
        self.speculation = Speculation(speculate)
        self._logits: Logits | None = None
        self._stream = self.cache.stream_number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Restore the model."""
        self.served.close()

    def reopen(self) -> None:
        """Serve the model again after `close`, with an empty cache."""
        number, self.served = self.cache.stream_number, self._serve()
        self.cache.stream_number = number  # from which `reset` counts on: no stream after it has an old number
        self.pinned_prefix = 0
        self.reset()

    @property
    def cache(self) -> StreamCache:
        """The cache of the stream."""
        return self.served.cache

    @property
    def context(self) -> int | None:
        """Positions the model was trained for, or None when its config names no limit."""
        return self.served.context

    @property
    def torn(self) -> bool:
        """Whether a step was cut off halfway. Then only `reset` and `load_state_dict` are allowed.

        Only the cache knows what happened to it: `tokens` is written before each step, and is compared with it.
        """
        cache = self.cache
        return cache.torn or self._stream != cache.stream_number or len(self.tokens) != cache.seen_tokens

    def reset(self) -> None:
        """Start a new stream with an empty cache. Pins stay."""
        self.cache.reset()
        self._logits, self.tokens, self._stream = None, NumberLog(), self.cache.stream_number

    def set_sampling(self, sampling: SamplingConfig, reseed: bool = False) -> None:
        """Change how tokens are sampled. The random generator continues unless `reseed` restarts it."""
        sampler = Sampler(sampling, self.served.generation, self._sampling_defaults)
        if not reseed:
            sampler.rng_state = self.sampler.rng_state
        self.sampling, self.sampler = sampling, sampler

    def state_dict(self) -> State:
        """A copy of the complete state, as arrays by name. It continues with a prefill.

        Raises:
            H2OStreamError: nothing was fed yet, or the last step was cut off halfway.
        """
        if self.torn:
            raise H2OStreamError("the last step was cut off halfway; there is no state to save")
        self.tokens = self.tokens.marked()
        return self.served.state_dict() | state_of(self.tokens, self.pinned_prefix, self.sampler.rng_state)

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Replace the stream by a saved state. The next prefill and all sampling after it continue exactly.

        A conversation on this engine must be replaced with it, by `Conversation.load_state_dict`.

        Raises:
            H2OStreamError: the state is damaged, or belongs to another model, dtype or policy. Nothing has changed.
        """
        tokens, pinned_prefix, rng_state = read_state(state)
        self.served.load_state_dict(state)
        self._logits = None
        self.tokens, self.pinned_prefix, self.sampler.rng_state = tokens, pinned_prefix, rng_state
        self._stream = self.cache.stream_number

    @property
    def counts(self) -> CacheCounts:
        """The current state of the cache."""
        return self.cache.counts()

    @property
    def beyond_context(self) -> bool:
        """Whether original positions have exceeded the model's trained context."""
        limit = self._max_tokens()
        return limit is not None and self.cache.seen_tokens > limit

    def pin(self, count: int) -> None:
        """Never evict the first `count` tokens, instead of those of the last call. See `H2OCache.pin`."""
        before, self.pinned_prefix = self.pinned_prefix, max(count, self.pinned_prefix)  # never too low if cut off
        try:
            self.cache.pin(0, count)
        except H2OStreamError:
            self.pinned_prefix = before
            raise
        self.cache.unpin(count, self.pinned_prefix)
        self.pinned_prefix = count

    def unpin(self) -> None:
        """Allow all tokens to be evicted again."""
        self.cache.unpin()
        self.pinned_prefix = 0

    def prefill(self, tokens: Sequence[int]) -> Iterator[PrefillProgress | Finished]:
        """Feed the new tokens of a turn.

        Yields:
            `PrefillProgress` after each part. `Finished` if the turn ends here: it was interrupted, memory ran out, or
            the whole prompt exceeds the positions that are left (then nothing was fed).
        """
        if not tokens:
            raise H2OStreamError("there is nothing to prefill: the prompt has no tokens")
        self._check_not_torn()
        elapsed_s = 0.0
        self.cache.begin(len(tokens))
        if detail := self._why_not(len(tokens)):
            yield Finished("context", detail=detail)
            return
        chunk, done = self.cache.plan.chunk or len(tokens), 0
        while done < len(tokens):
            if self.should_stop():
                yield Finished("interrupted")
                return
            step, started = max(self.prefill_step // chunk, 1) * chunk, time.perf_counter()
            part = list(tokens[done : done + step])
            try:
                yield from self.forward(part)
            except OutOfMemoryError as error:
                yield Finished("oom", detail=str(error))
                return
            done += len(part)
            if len(tokens) >= PREFILL_STEP and done == len(tokens):
                trim_heap()
            elapsed_s += time.perf_counter() - started
            yield PrefillProgress(done, len(tokens), elapsed_s, self.counts)

    def decode(
        self,
        stops: Sequence[str] = (),
        visible: Mapping[int, str] = MappingProxyType({}),
        thinking: bool = False,
        max_tokens: int | None = None,
    ) -> Iterator[Token | Finished]:
        """Generate a reply, until it ends or reaches a limit.

        Args:
            stops: strings that end the reply, in addition to those of the sampling config.
            visible: the text of control tokens that are part of the text all the same, by id.
            thinking: whether the prompt has begun the thinking of the reply.
            max_tokens: how much; None is the limit of the sampling config.

        Yields:
            A `Token` for each token, the end-of-turn token included, then one `Finished`.

        Raises:
            H2OStreamError: nothing was fed yet.
        """
        try:
            yield from self._generate(stops, visible, thinking, max_tokens)
        finally:
            self.served.take_back()

    def _generate(
        self, stops: Sequence[str], visible: Mapping[int, str], thinking: bool, max_tokens: int | None
    ) -> Iterator[Token | Finished]:
        """See `decode`; the slots may have guesses at the end."""
        text, elapsed_s = TextStream(self.tokenizer, (*self.sampling.stop, *stops), visible), 0.0
        matcher = self.grammar.matcher(thinking) if self.grammar else None
        reply, passes = list[int](), self.speculation.passes
        limit = self.sampling.max_tokens if max_tokens is None else max_tokens
        self.sampler.end_tokens = [*self.end_tokens]
        while len(reply) < limit:
            if self.should_stop():
                yield Finished("interrupted", text.flush())
                return
            if detail := self._why_not(1):
                yield Finished("context", text.flush(), detail)
                return
            self._check_not_torn()
            if self._logits is None:
                raise H2OStreamError("there is nothing to continue: prefill a prompt first")
            started = time.perf_counter()
            try:
                token = self.sampler.sample(self._logits, reply, matcher.masked if matcher else None)
                if matcher:
                    matcher.accept(token)
                ended = token in self.end_tokens
                wanted = 0 if ended else limit - len(reply) - 1
                yield from self.forward([token], partial(self._speculate, wanted, matcher))
            except OutOfMemoryError as error:
                yield Finished("oom", text.flush(), str(error))
                return
            reply.append(token)
            piece = "" if ended else text.push(token)
            elapsed_s += time.perf_counter() - started
            passed = self.speculation.passes - passes
            yield Token(token, piece, elapsed_s, len(self.tokens), self.cache.counts, passes=passed)
            if ended or text.stopped:
                yield Finished("stop", text.flush(), cut=text.stopped)
                return
        yield Finished("length", text.flush())

    def _check_not_torn(self) -> None:
        if self.torn:
            raise H2OStreamError(TORN_MESSAGE)

    def forward(self, tokens: Sequence[int], step: Callable[[], Logits] | None = None) -> Iterator[Never]:
        """Take tokens through the model; a token of a reply by `step`. Yields nothing; an engine that is stepped with
        others waits for it here.

        Raises:
            OutOfMemoryError: memory ran out.
        """
        self.begin(tokens)
        try:
            self.finish(step() if step else self.served.forward(tokens))
        except (MemoryError, RuntimeError) as error:
            if not means_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"out of memory after {self.cache.seen_tokens} tokens; "
                "with --policy h2o and a fixed --window, memory does not grow with the conversation"
            ) from error
        yield from ()

    def _speculate(self, max_guesses: int, matcher: Matcher | None) -> Logits:
        """Take the last token through the model, with at most so many guesses. Returns the logits after it."""
        if (limit := self._max_tokens()) is not None:
            max_guesses = min(max_guesses, max(limit - len(self.tokens), 0))
        return self.speculation.step(self.served, self.tokens.array, max_guesses, matcher)

    def begin(self, tokens: Sequence[int]) -> None:
        """Note tokens that are about to go through the model."""
        self._logits = None
        self.tokens = self.tokens.append(tokens)

    def finish(self, logits: Logits) -> None:
        """Note that they are in the cache, and the logits [V] after the last one."""
        self._logits = logits

    def _max_tokens(self) -> int | None:
        """How many original positions the model was trained for; None if positions are reassigned."""
        return self.context if self.cache.plan.positions == "absolute" else None

    def _why_not(self, new: int) -> str:
        """Why `new` more tokens do not fit into the context, or an empty string."""
        limit, seen = self._max_tokens(), self.cache.seen_tokens
        if limit is None or seen + new <= limit:
            return ""
        message = f"{seen} tokens seen and {new} new ones exceed the model's {limit} "
        if self.served.learned_positions is not None:
            return f"{message}learned positions; reset the conversation or use another model"
        if self.at_context == "stop":
            return f"{message}positions; use --policy h2o, or continue beyond them with --at-context continue"
        return ""
