"""How tokens are sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from h2o_stream.config.model import DEFAULT_MODEL
from h2o_stream.errors import ConfigError

DEFAULT_TEMPERATURE = 0.7
DEFAULT_TOP_P = 0.95
DEFAULT_TOP_K = 0

MAX_PENALTY = 2
"""Largest of the penalties that are subtracted, as in OpenAI's API."""

MODEL_SAMPLING: Mapping[str, Mapping[str, float]] = {
    # Nothing is recommended with it, and a model of this size repeats itself: docs/fidelity.md has the figures.
    DEFAULT_MODEL: {"repetition_penalty": 1.1},
}
"""Sampling of models, by a part of the name, where their generation config says nothing."""

BENCH = "bench"
BENCH_TEMPERATURES: Mapping[str, float] = {
    "writing": 0.7,
    "roleplay": 0.7,
    "extraction": 0.0,
    "math": 0.0,
    "coding": 0.0,
    "reasoning": 0.0,
    "stem": 0.1,
    "humanities": 0.1,
}
"""MT-Bench's temperatures of its categories."""


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are sampled.

    Args:
        temperature: 0 is greedy; ``bench`` is `BENCH_TEMPERATURES` by the question's category; None is what the model's
            generation config recommends, or `MODEL_SAMPLING`, or `DEFAULT_TEMPERATURE`.
        top_p: keep the most probable tokens up to this mass; None as above.
        top_k: keep this many most probable tokens; 0 keeps all; None as above.
        min_p: drop tokens below this fraction of the probability of the most probable one; None as above, or 0.
        repetition_penalty: above 1 makes the tokens of this turn less likely to be repeated; None as above, or 1. At
            temperature 0, which takes the most probable token, None is 1.
        frequency_penalty: subtracted from a token's logit for each time that the reply has it; 0 is none.
        presence_penalty: subtracted if the reply has the token at all; 0 is none.
        repeat_last_n: how many of the last tokens the three penalties look at; -1 is the turn, 0 none.
        seed: of the sampler; None chooses one and reports it.
        max_tokens: maximum tokens of a reply.
        stop: strings that end a reply and are not shown.
    """

    temperature: float | Literal["bench"] | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = -1
    seed: int | None = None
    max_tokens: int = 512
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.temperature, str):
            if self.temperature != BENCH:
                raise ConfigError(
                    f"temperature is {self.temperature!r}; --temp takes a number, or {BENCH} in h2o-stream"
                )
        elif self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; --temp must be 0 (greedy) or above")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; --top-p must be above 0 and at most 1")
        if self.top_k is not None and self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; --top-k must be 0 (all) or above")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p is {self.min_p}; --min-p must be between 0 and 1")
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty < float("inf"):
            raise ConfigError(f"repetition_penalty is {self.repetition_penalty}; --repetition-penalty must be above 0")
        for name in ("frequency_penalty", "presence_penalty"):
            if not -MAX_PENALTY <= (value := getattr(self, name)) <= MAX_PENALTY:
                limits = f"between -{MAX_PENALTY} and {MAX_PENALTY}"
                raise ConfigError(f"{name} is {value}; --{name.replace('_', '-')} must be {limits}")
        if self.repeat_last_n < -1 or self.repeat_last_n != int(self.repeat_last_n):
            raise ConfigError(f"repeat_last_n is {self.repeat_last_n}; --repeat-last-n must be -1 (all) or a number")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}; --seed must be between 0 and 2**63 - 1")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; --max-tokens must be at least 1")
        if any(not stop for stop in self.stop):
            raise ConfigError("a stop string is empty; --stop needs at least one character")


def model_sampling(name: str) -> Mapping[str, float]:
    """Our own sampling defaults of a model: those of the first entry of `MODEL_SAMPLING` that its name contains."""
    return next((values for known, values in MODEL_SAMPLING.items() if known in name.lower()), {})
