"""The engine of one conversation among many: its tokens wait for a step or a prompt that takes those of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream.config import CacheConfig, SamplingConfig
from h2o_stream.engine.engine import Engine
from h2o_stream.engine.sampling import Sampler, Scores
from h2o_stream.errors import H2OStreamError
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.native.batch import rules
from h2o_stream.native.stepper import PromptPlan, Stepper

PREFILL_STEP = 256
"""Prompt tokens at a time, between steps of other conversations."""


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

    def sample(self, logits: Scores, reply: Sequence[int] = (), mask: Callable[[Scores], Scores] | None = None) -> int:
        """See `Sampler`."""
        token = super().sample(logits, reply, mask)
        if self.logprobs is not None:
            self.sampled.append(_logprob(logits, token, self.logprobs))
        return token

    def take(self) -> tuple[Logprob, ...]:
        """What was sampled since the last call."""
        sampled, self.sampled = tuple(self.sampled), []
        return sampled


def _logprob(logits: Scores, token: int, count: int) -> Logprob:
    top = logits.max()
    total = float(top) + float(numpy.log(numpy.exp(logits - top, dtype=numpy.float64).sum()))
    logits = numpy.maximum(logits, numpy.float32(total + _LEAST))
    best = numpy.argpartition(logits, -count)[-count:] if count else numpy.empty(0, numpy.int64)
    best = best[(-logits[best]).argsort(kind="stable")]
    likely = tuple((int(number), float(logits[number]) - total) for number in best)
    return Logprob(token, float(logits[token]) - total, likely)


class WaitingEngine(Engine):
    """An engine that leaves tokens to a step or a prompt of several streams.

    Between the event of its tokens and `finish` they are not in the cache yet, so nothing else may be done.

    Attributes:
        waiting: the tokens for the next step, if it is one, or the next prompt.
    """

    def __init__(self, model: LoadedModel, cache: CacheConfig, sampling_defaults: Mapping[str, float]) -> None:
        super().__init__(model.model, model.tokenizer, cache, sampling_defaults=sampling_defaults)
        self.waiting: Sequence[int] = ()
        self.prefill_step = min(self.prefill_step, PREFILL_STEP)
        self._rules: tuple[int, bytes] = (-1, b"")

    @property
    def stepper(self) -> Stepper:
        """Steps its stream."""
        stepper: Stepper = self.served.stepper  # type: ignore[attr-defined]
        return stepper

    @property
    def steps(self) -> bool:
        """Whether a token waits for a step."""
        return len(self.waiting) == 1 and bool(self.cache.tokens.lengths)

    @property
    def reads(self) -> bool:
        """Whether tokens wait for a prompt."""
        return bool(self.waiting) and not self.steps

    @property
    def rules(self) -> bytes:
        """Streams with the same can be stepped together, and read together if their prompts have begun."""
        revision = self.stepper.revision
        if self._rules[0] != revision:
            self._rules = revision, rules(self.stepper)
        return self._rules[1]

    def sample_by(self, config: SamplingConfig, logprobs: int | None) -> LogprobSampler:
        """Sample the next reply by these settings."""
        sampler = LogprobSampler(config, self.served.generation, self._sampling_defaults)
        sampler.logprobs = logprobs
        self.sampling, self.sampler = config, sampler
        return sampler

    def begin_step(self) -> None:
        """Prepare the waiting token for a step.

        Raises:
            H2OStreamError: it cannot be fed.
        """
        if not self.stepper.begin_step(numpy.array(self.waiting, numpy.int64)):
            raise H2OStreamError(f"this token cannot be fed: {self.stepper.why_not or 'the model has no such token'}")

    def begin_prompt(self) -> PromptPlan:
        """Prepare the waiting tokens for a prompt.

        Raises:
            H2OStreamError: they cannot be fed.
        """
        plan = self.stepper.begin_prompt(numpy.array([self.waiting], numpy.int64))
        if plan is None:
            raise H2OStreamError(f"these tokens cannot be fed: {self.stepper.why_not or 'the model has no such token'}")
        return plan

    def finish(self, logits: NDArray[numpy.float32]) -> None:
        """The waiting tokens are in the cache; logits [V] are valid until the next step."""
        self.waiting, self._logits = (), logits

    def end_reply(self) -> None:
        """Let the logits and the grammar go: the next turn begins with a prompt."""
        self._logits = self.grammar = None

    def _forward(self, tokens: list[int]) -> None:
        self._logits, self.waiting = None, tokens
        self.tokens = self.tokens.append(tokens)
        self.cache.prepare(len(tokens))
