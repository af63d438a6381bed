"""How tokens are sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from h2o_stream.config.model import DEFAULT_MODEL
from h2o_stream.errors import ConfigError

DEFAULT_TEMPERATURE = 0.7
FOCUSED_TEMPERATURE = 0.1
"""The default temperature where a passage was recalled or a schema is to be followed: of 24 questions about a pasted
text 18 are answered with it, as greedily, and 15 with 0.7."""

DEFAULT_TOP_P = 0.95
DEFAULT_TOP_K = 0
DEFAULT_DRY_MULTIPLIER = 0.8
DRY_BASE = 1.75

MAX_PENALTY = 2
"""Largest of the penalties that are subtracted, as in OpenAI's API."""

MODEL_SAMPLING: Mapping[str, Mapping[str, float]] = {
    # Temperature and top-p of the makers' example; one of this size repeats itself (docs/fidelity.md has the figures).
    DEFAULT_MODEL: {"temperature": 0.2, "top_p": 0.9, "dry_allowed_length": 3},
    "smollm2": {"temperature": 0.2, "top_p": 0.9},
}
"""Sampling of models, by a part of the name, where their generation config says nothing."""

MAX_DRY_BASE = 4

MAX_SEED, MAX_COUNT = 2**63, 2**31
"""More than all seeds, and than all numbers of tokens."""

_COUNTS = ("top_k", "dry_allowed_length", "repeat_last_n", "seed", "max_tokens", "min_tokens", "thinking_budget")
"""What is counted, also where JSON has it with a point."""

MAX_SCALE = 1e6
"""Largest temperature, repetition penalty either way, and multiplier: float32 has what they make of logits."""

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
        repetition_penalty: above 1 makes the tokens of the reply less likely to be repeated; None as above, or 1. At
            temperature 0, which takes the most probable token, None is 1.
        dry_multiplier: a token that would lengthen a sequence which the reply has already loses `dry_multiplier *
            dry_base ** (length - dry_allowed_length)` of its logit, if the sequence has at least the allowed length; 0
            is none. None is `DEFAULT_DRY_MULTIPLIER`, or 0 at temperature 0 and beside a repetition penalty. Named
            after the DRY sampler of other programs.
        dry_base: see above.
        dry_allowed_length: see above; 0 is for loops, in which a sequence follows itself, and a little for other long
            ones (`engine.sampling.SAID_LENGTH`). None as above, or 0.
        frequency_penalty: subtracted from a token's logit for each time that the reply has it; 0 is none.
        presence_penalty: subtracted if the reply has the token at all; 0 is none.
        repeat_last_n: how many of the reply's last tokens the penalties look at; -1 is all of them, 0 none.
        seed: seed of the sampler; None chooses one and reports it.
        min_tokens: the model does not end a reply before it has so many; a grammar or `stop` may.
        thinking_budget: tokens after which thinking is ended; None is no limit.
        thinking_message: said by the model before thinking is ended so.
        logit_bias: added to the logits of tokens: pairs of an id and a number.
        stop: strings that end a reply and are not shown.
    """

    temperature: float | Literal["bench"] | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float = DRY_BASE
    dry_allowed_length: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = -1
    seed: int | None = None
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    thinking_budget: int | None = None
    thinking_message: str = ""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if isinstance(value := getattr(self, name), float):
                if not value.is_integer():
                    raise ConfigError(f"{name} is {value}; --{name.replace('_', '-')} must be a whole number")
                object.__setattr__(self, name, int(value))
        if isinstance(self.temperature, str):
            if self.temperature != BENCH:
                raise ConfigError(
                    f"temperature is {self.temperature!r}; --temp takes a number, or {BENCH} in h2o-stream"
                )
        elif self.temperature is not None and not 0 <= self.temperature <= MAX_SCALE:
            limits = f"0 (greedy) or above, up to {MAX_SCALE:g}"
            raise ConfigError(f"temperature is {self.temperature}; --temp must be {limits}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; --top-p must be above 0 and at most 1")
        if self.top_k is not None and not 0 <= self.top_k < MAX_COUNT:
            raise ConfigError(f"top_k is {self.top_k}; --top-k must be 0 (all) or above, below {MAX_COUNT}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p is {self.min_p}; --min-p must be between 0 and 1")
        if (penalty := self.repetition_penalty) is not None and not 1 / MAX_SCALE <= penalty <= MAX_SCALE:
            limits = f"above 0, from {1 / MAX_SCALE:g} to {MAX_SCALE:g}"
            raise ConfigError(f"repetition_penalty is {penalty}; --repetition-penalty must be {limits}")
        if self.dry_multiplier is not None and not 0 <= self.dry_multiplier <= MAX_SCALE:
            limits = f"0 (none) or above, up to {MAX_SCALE:g}"
            raise ConfigError(f"dry_multiplier is {self.dry_multiplier}; --dry-multiplier must be {limits}")
        if not 1 <= self.dry_base <= MAX_DRY_BASE:
            raise ConfigError(f"dry_base is {self.dry_base}; --dry-base must be between 1 and {MAX_DRY_BASE}")
        if (length := self.dry_allowed_length) is not None and not 0 <= length < MAX_COUNT:
            limits = f"0 (the default rules) or above, below {MAX_COUNT}"
            raise ConfigError(f"dry_allowed_length is {length}; --dry-allowed-length must be {limits}")
        for name in ("frequency_penalty", "presence_penalty"):
            if not -MAX_PENALTY <= (value := getattr(self, name)) <= MAX_PENALTY:
                limits = f"between -{MAX_PENALTY} and {MAX_PENALTY}"
                raise ConfigError(f"{name} is {value}; --{name.replace('_', '-')} must be {limits}")
        if not -1 <= self.repeat_last_n < MAX_COUNT:
            raise ConfigError(f"repeat_last_n is {self.repeat_last_n}; --repeat-last-n must be -1 (all) or a number")
        if self.seed is not None and not 0 <= self.seed < MAX_SEED:
            raise ConfigError(f"seed is {self.seed}; --seed must be between 0 and 2**63 - 1")
        if not 1 <= self.max_tokens < MAX_COUNT:
            raise ConfigError(f"max_tokens is {self.max_tokens}; --max-tokens must be at least 1, below {MAX_COUNT}")
        if not 0 <= self.min_tokens < MAX_COUNT:
            raise ConfigError(f"min_tokens is {self.min_tokens}; it must be 0 (none) or above, below {MAX_COUNT}")
        if (budget := self.thinking_budget) is not None and not 0 <= budget < MAX_COUNT:
            raise ConfigError(f"thinking_budget is {budget}; it must be 0 (no thinking) or above, below {MAX_COUNT}")
        if any(not stop for stop in self.stop):
            raise ConfigError("a stop string is empty; --stop needs at least one character")

    def of_choice(self, number: int) -> SamplingConfig:
        """This config for one of several replies to the same message: a seed becomes another one for each."""
        return self if self.seed is None else replace(self, seed=(self.seed + number) % MAX_SEED)


def model_sampling(name: str) -> Mapping[str, float]:
    """Our own sampling defaults of a model: those of the first entry of `MODEL_SAMPLING` that its name contains."""
    return next((values for known, values in MODEL_SAMPLING.items() if known in name.lower()), {})
