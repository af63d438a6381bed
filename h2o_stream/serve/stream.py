"""The engine of one conversation among many: its tokens wait for a step or a prompt that takes those of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Any

import numpy

from h2o_stream.config import CacheConfig, SamplingConfig, SpeculateMode
from h2o_stream.engine.engine import Engine
from h2o_stream.engine.logits import Logits, Scores, TokenIds
from h2o_stream.engine.nucleus import at_least, largest
from h2o_stream.engine.sampling import Sampler
from h2o_stream.errors import H2OStreamError
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.native.stepper import PromptPlan

_ALONE, _BESIDE = 256, 64
"""Prompt tokens that are read together, and as many while there are replies."""

_SLOW_S, _SHARE = 0.1, 0.4
"""Seconds that replies should not wait longer for, and the part of their steps' mean time that prompts have anyway."""

_NEWEST = 0.1
"""The weight of the last step in their mean time."""

_LEAST = -9999.0
"""The logprob of what is impossible, as in OpenAI's API: JSON has no infinity."""


@dataclass(frozen=True)
class Logprob:
    """A sampled token, how likely it was, and the likeliest ones: ids and natural logarithms of probabilities."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class LogprobSampler(Sampler):
    """A sampler that notes how likely its tokens were, before a grammar, temperature and all else.

    Attributes:
        logprobs: how many likely tokens are noted beside the sampled one; None notes nothing.
        sampled: the tokens since `take`.
    """

    logprobs: int | None = None

    def __init__(
        self, config: SamplingConfig, recommended: Any, model_defaults: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        super().__init__(config, recommended, model_defaults)
        self.sampled: list[Logprob] = []

    def sample(self, logits: Logits, reply: Sequence[int] = (), mask: Callable[[Scores], Scores] | None = None) -> int:
        """The next token."""
        token = super().sample(logits, reply, mask)
        if self.logprobs is not None:
            self.sampled.append(_logprob(numpy.asarray(logits), token, self.logprobs))
        return token

    def take(self) -> tuple[Logprob, ...]:
        """What was sampled since the last call."""
        sampled, self.sampled = tuple(self.sampled), []
        return sampled


def _logprob(logits: Scores, token: int, count: int) -> Logprob:
    top = logits.max()
    total = float(top) + float(numpy.log(numpy.exp(logits - top).sum(dtype=numpy.float64)))
    likely = tuple((int(number), max(float(logits[number]) - total, _LEAST)) for number in _likeliest(logits, count))
    return Logprob(token, max(float(logits[token]) - total, _LEAST), likely)


def _likeliest(logits: Scores, count: int) -> TokenIds:
    """The tokens with the largest logits, best first."""
    if not count:
        return numpy.empty(0, numpy.int64)
    best = at_least(logits, largest(logits, count))
    return best[(-logits[best]).argsort(kind="stable")][:count]


class Pace:
    """How many tokens of prompts are read together, and how long beside replies.

    Attributes:
        replies: whether there are replies that wait meanwhile.
    """

    replies = False
    _mean_s = 0.0

    @property
    def tokens(self) -> int:
        """Number of prompt tokens."""
        return _BESIDE if self.replies else _ALONE

    def seconds(self, step_s: float) -> float:
        """How long prompts are read after a step of replies that took so long; less than none after a slow one."""
        if not self.replies:
            return inf
        self._mean_s += _NEWEST * (step_s - self._mean_s)
        return max(_SLOW_S, (1 + _SHARE) * self._mean_s) - step_s


class Waits:
    """The `waiting` tokens of an engine are to go through the model before it goes on."""


class WaitingEngine(Engine):
    """An engine whose tokens go through the model with those of others.

    Attributes:
        waiting: the tokens for the next step, if it is one, or the next prompt.
    """

    def __init__(self, model: LoadedModel, cache: CacheConfig, pace: Pace, speculate: SpeculateMode) -> None:
        self._pace = pace
        super().__init__(model.model, model.tokenizer, cache, sampling_defaults=model.sampling, speculate=speculate)
        self.waiting: Sequence[int] = ()
        self._step: Callable[[], Logits] | None = None
        self._rules: tuple[int, bytes] = (-1, b"")

    @property
    def stepper(self) -> Any:
        """Steps its stream, with those of others by `ManyStreams.make_batch`."""
        return self.served.stepper  # type: ignore[attr-defined]

    @property
    def prefill_step(self) -> int:
        """See `Engine`; not more than others can wait for."""
        return min(self._largest_step, self._pace.tokens)

    @prefill_step.setter
    def prefill_step(self, tokens: int) -> None:
        self._largest_step = tokens

    @property
    def steps(self) -> bool:
        """Whether a token waits for a step, and not for a prompt."""
        return len(self.waiting) == 1 and bool(self.cache.tokens.lengths)

    @property
    def can_guess(self) -> bool:
        """Whether a token waits for a step that may take guesses along."""
        return self.steps and self._step is not None and self.speculation.mode == "auto"

    @property
    def rules(self) -> bytes:
        """Streams with the same can be stepped together, and read together if their prompts have begun."""
        revision = self.cache.revision
        if self._rules[0] != revision:
            self._rules = revision, self.served.rules  # type: ignore[attr-defined]
        return self._rules[1]

    def sample_by(self, config: SamplingConfig, logprobs: int | None) -> LogprobSampler:
        """Sample the next reply by these settings."""
        sampler = LogprobSampler(config, self.served.generation, self._sampling_defaults)
        sampler.logprobs = logprobs
        self.sampling, self.sampler = config, sampler
        return sampler

    def forward(  # type: ignore[override]
        self, tokens: Sequence[int], step: Callable[[], Logits] | None = None
    ) -> Iterator[Waits]:
        """Wait until `begin_waiting` or `step_alone` and then `finish` were called. If they are not, nothing was fed.

        A token that was guessed does not wait.
        """
        if step and self.served.lookahead.tokens[:1] == tokens:  # type: ignore[attr-defined]
            self.begin(tokens)
            self.finish(step())
            return
        self.waiting, self._step = tokens, step
        try:
            yield Waits()
        finally:
            self.waiting = ()

    def begin_waiting(self) -> PromptPlan | None:
        """Prepare the waiting tokens for a step, or for a prompt as the plan says.

        Raises:
            H2OStreamError: they cannot be fed.
        """
        steps, tokens = self.steps, numpy.array(self.waiting, numpy.int64)
        self.begin(self.waiting)
        self.speculation.passes += steps
        self.cache.prepare(len(tokens))
        plan = None if steps else self.stepper.begin_prompt(tokens[None])
        if plan is None and not (steps and self.stepper.begin_step(tokens)):
            raise H2OStreamError(f"these tokens cannot be fed: {self.stepper.why_not or 'the model has no such token'}")
        return plan

    def step_alone(self) -> Logits:
        """Take the waiting token through the model without those of others, and perhaps guesses; the logits after it.

        Raises:
            H2OStreamError: it cannot be fed.
        """
        assert self._step, "it is a token of a reply"
        self.begin(self.waiting)
        return self._step()

    def finish(self, logits: Logits) -> None:
        """See `Engine`; the logits are valid until the next step."""
        super().finish(logits)
        self.waiting = ()

    def end_reply(self) -> None:
        """Let the logits and the grammar go: the next turn begins with a prompt."""
        self._logits = self.grammar = self._step = None
        self.served.lookahead.release()  # type: ignore[attr-defined]
