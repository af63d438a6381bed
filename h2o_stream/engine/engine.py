"""The engine: a model, its cache and a sampler; prompts go in, events come out.

Every token it shows is in the cache before it is shown. Between two events it can be left alone, closed or
told to stop, and the stream goes on from there with the next prefill.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor

from h2o_stream.cache.attach import attach
from h2o_stream.cache.counts import CacheCounts
from h2o_stream.cache.state import checksummed, require_tensor, verify_checksums
from h2o_stream.cache.support import context_of, home_of, learned_positions, size_of
from h2o_stream.config import (
    PREFILL_STEP,
    PREFILL_STEP_MAX,
    PREFILL_WORK,
    AtContext,
    CacheConfig,
    EngineChoice,
    SamplingConfig,
)
from h2o_stream.engine.events import Finished, PrefillProgress, Token
from h2o_stream.engine.sampling import Sampler, check_draws
from h2o_stream.engine.text import TextStream
from h2o_stream.errors import H2OStreamError, OutOfMemoryError, means_out_of_memory
from h2o_stream.memory import trim_heap
from h2o_stream.progress import ProgressCallback, ignore

TORN = "the last step was cut off halfway; reset the conversation to go on"

_CHECKSUMS = "engine.checksums"


class Engine:
    """One endless stream of tokens through one model. A context manager: leaving it gives the model back.

    Attributes:
        tokens: ids of all that were fed since the start, 4 bytes each.
        opening: tokens that `pin` protects.
        step: prompt tokens per forward, see `prefill_step`.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer.
        cache: which tokens are kept.
        sampling: how tokens are drawn.
        at_context: whether a cache that keeps original positions goes on past the positions the model was
            trained for, or ends there.
        should_stop: asked between tokens and between parts of a prompt; True ends the turn as ``interrupted``.
        engine: what runs a step, see `attach`.
        progress: told how far preparations have come, see `attach`.

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
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.sampling = sampling or SamplingConfig()
        self.sampler = Sampler(self.sampling, model.generation_config)
        self.at_context = at_context
        self.should_stop = should_stop
        self.context = context_of(model.config)
        self._last_position = learned_positions(model.config)
        self.opening = 0
        self.step = prefill_step(model)
        self.tokens = array("i")
        self.end_tokens = _end_tokens(model, tokenizer)
        self._stack = ExitStack()
        self.cache = self._stack.enter_context(attach(model, cache, engine=engine, progress=progress))
        self._logits: Tensor | None = None
        self._turn: list[int] = []
        self._torn = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the model back as it was."""
        self._stack.close()

    @property
    def torn(self) -> bool:
        """Whether a step was cut off halfway: then only `reset` and `load_state_dict` can be called."""
        return self._torn or self.cache.torn

    def reset(self) -> None:
        """Start a new stream with an empty cache; pins stay."""
        self._torn = True
        self.cache.reset()
        self._logits, self._turn = None, []
        del self.tokens[:]
        self._torn = False

    def resample(self, sampling: SamplingConfig, reseed: bool = False) -> None:
        """Draw tokens another way from now on.

        Args:
            sampling: how.
            reseed: begin the random draws anew with its seed; otherwise they go on where they are.
        """
        sampler = Sampler(sampling, self.model.generation_config)
        if not reseed:
            sampler.state = self.sampler.state
        self.sampling, self.sampler = sampling, sampler

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of everything there is to go on from with a prefill, as safetensors takes it.

        Raises:
            H2OStreamError: nothing was fed yet, or the last step was cut off halfway.
        """
        if self.torn:
            raise H2OStreamError("the last step was cut off halfway; there is no state to save")
        own = {
            "engine.tokens": torch.tensor(self.tokens, dtype=torch.int32),
            "engine.opening": torch.tensor(self.opening),
            "engine.draws": self.sampler.state.clone(),
        }
        return self.cache.state_dict() | checksummed(own, _CHECKSUMS)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state: the next prefill and what is drawn after it are what they would have been.

        Raises:
            H2OStreamError: the engine's own part is damaged, or its draws are those of another device; nothing has
                changed then. Or the state belongs to another model, dtype or policy, or the cache's part is damaged;
                the stream is torn then.
        """
        verify_checksums(state, _CHECKSUMS)
        tokens, opening, draws = (require_tensor(state, f"engine.{name}") for name in ("tokens", "opening", "draws"))
        check_draws(draws)
        self.reset()
        self._torn = True
        self.cache.load_state_dict(state)
        self.tokens.extend(tokens.tolist())
        self.opening = int(opening)
        self.sampler.state = draws
        self._torn = False

    @property
    def counts(self) -> CacheCounts:
        """Where the tokens are now."""
        return self.cache.counts()

    @property
    def beyond_context(self) -> bool:
        """Whether original positions have passed what the model was trained for."""
        limit = self._limit()
        return limit is not None and self.cache.seen_tokens > limit

    def pin(self, count: int) -> None:
        """Never evict the first `count` tokens, instead of those of the last call; see `H2OCache.pin`."""
        before, self.opening = self.opening, max(count, self.opening)  # cut off here, no more is pinned than it says
        try:
            self.cache.pin(0, count)
        except H2OStreamError:
            self.opening = before
            raise
        self.cache.unpin(count, self.opening)
        self.opening = count

    def unpin(self) -> None:
        """Let every token be evicted again."""
        self.cache.unpin()
        self.opening = 0

    def prefill(self, tokens: Sequence[int]) -> Iterator[PrefillProgress | Finished]:
        """Feed a turn's new tokens.

        Yields:
            `PrefillProgress` after each part, and `Finished` if the turn ends here: interrupted, out of
            memory, or with no position left for the whole prompt (then nothing was fed).
        """
        if not tokens:
            raise H2OStreamError("there is nothing to prefill: the prompt has no tokens")
        self._refuse_torn()
        self._turn, elapsed_s = list(tokens), 0.0
        self.cache.begin(len(tokens))
        if detail := self._refusal(len(tokens)):
            yield Finished("context", detail=detail)
            return
        chunk = self.cache.plan.chunk or len(tokens)
        step = max(self.step // chunk, 1) * chunk
        for start in range(0, len(tokens), step):
            if self.should_stop():
                yield Finished("interrupted")
                return
            part, begun = self._turn[start : start + step], time.perf_counter()
            try:
                self._feed(part)
            except OutOfMemoryError as error:
                yield Finished("oom", detail=str(error))
                return
            if len(tokens) >= PREFILL_STEP and start + step >= len(tokens):
                trim_heap()
            elapsed_s += time.perf_counter() - begun
            yield PrefillProgress(min(start + step, len(tokens)), len(tokens), elapsed_s, self.counts)

    def decode(self, stops: Sequence[str] = ()) -> Iterator[Token | Finished]:
        """Continue the stream until it ends by itself or by a limit.

        Args:
            stops: strings that end the reply, beside those of the sampling config.

        Yields:
            A `Token` for each token, the end-of-turn token included, then one `Finished`.

        Raises:
            H2OStreamError: nothing was fed yet.
        """
        text, elapsed_s = TextStream(self.tokenizer, (*self.sampling.stop, *stops)), 0.0
        for _ in range(self.sampling.max_tokens):
            if self.should_stop():
                yield Finished("interrupted", text.flush())
                return
            if detail := self._refusal(1):
                yield Finished("context", text.flush(), detail)
                return
            self._refuse_torn()
            if self._logits is None:
                raise H2OStreamError("there is nothing to continue: prefill a prompt first")
            begun, self._torn = time.perf_counter(), True  # a draw without its token is half a step
            try:
                token = self.sampler.draw(self._logits, self._turn)
                self._feed([token])
            except OutOfMemoryError as error:
                yield Finished("oom", text.flush(), str(error))
                return
            self._turn.append(token)
            ended = token in self.end_tokens
            piece = "" if ended else text.push(token)
            elapsed_s += time.perf_counter() - begun
            yield Token(token, piece, elapsed_s, len(self.tokens), self.cache.counts)
            if ended or text.stopped:
                yield Finished("stop", text.flush())
                return
        yield Finished("length", text.flush())

    def _refuse_torn(self) -> None:
        if self.torn:
            raise H2OStreamError(TORN)

    @torch.no_grad()
    def _feed(self, tokens: list[int]) -> None:
        self._torn = True
        try:
            ids = torch.tensor([tokens], dtype=torch.int64, device=home_of(self.model))
            output = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        except (MemoryError, RuntimeError) as error:
            if not means_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"out of memory after {self.cache.seen_tokens} tokens; "
                "a fixed --window with --policy h2o needs no more, however long the chat"
            ) from error
        self._logits = output.logits[0, -1]
        self.tokens.extend(tokens)
        self._torn = False

    def _limit(self) -> int | None:
        """Tokens whose original positions the model knows; None when positions are re-assigned."""
        return self.context if self.cache.plan.positions == "absolute" else None

    def _refusal(self, new: int) -> str:
        """Why `new` more tokens may not be fed, or nothing."""
        limit, seen = self._limit(), self.cache.seen_tokens
        if limit is None or seen + new <= limit:
            return ""
        passed = f"{seen} tokens seen and {new} new ones pass the model's {limit} "
        if self._last_position is not None:
            return f"{passed}learned positions; nothing lies beyond them, reset the conversation or use another model"
        if self.at_context == "stop":
            return f"{passed}positions; use --policy h2o, or go on beyond them with --at-context continue"
        return ""


def prefill_step(model: Any) -> int:
    """How many tokens of a prompt to feed at once: as many as a small machine can in a second or two."""
    if home_of(model).type != "cpu":
        return PREFILL_STEP_MAX
    step = PREFILL_STEP
    while step < PREFILL_STEP_MAX and 2 * step * size_of(model) <= PREFILL_WORK:
        step *= 2
    return step


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends a turn, by the model's generation config and by its tokenizer."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return frozenset(token for token in (*ends, tokenizer.eos_token_id) if token is not None)
