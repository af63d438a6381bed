"""Samples the next token: penalties, then temperature, top-k, top-p and min-p as transformers' processors do.

Penalties look at the reply alone: what was read, such as a message, a file or a recalled passage, may be said again.

A token is drawn on one thread, while the model's other threads sleep: few operations touch the whole vocabulary.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

from h2o_stream.base.processes import broadcast
from h2o_stream.config import (
    BENCH,
    DEFAULT_DRY_MULTIPLIER,
    DEFAULT_TEMPERATURE,
    DEFAULT_TOP_K,
    DEFAULT_TOP_P,
    FOCUSED_TEMPERATURE,
    SamplingConfig,
)
from h2o_stream.errors import ConfigError, H2OStreamError

Scores = NDArray[np.float32]
TokenIds = NDArray[np.int64]
RngState = NDArray[np.uint8]

_NUCLEUS_CUTOFFS = 1e-4, 1e-6, 1e-45
"""The nucleus is searched among tokens above the first probability, then above the second, then among all that have
one: float32 has no smaller number than the third."""

_LOW_TEMPERATURE, _HIGH_SCORE = 1e-3, 1e20
"""Beyond these, quotients of scores may not be numbers of float32: those of differences are."""

_MIN_TEMPERATURE = 1e-20
"""Lower ones are taken for this: the likeliest token is certain long before, and float32 has quotients of logits."""

_MIN_SCORE = float(np.finfo(np.float32).min)
"""All scores but -inf are at least this."""

_BLOCKS = 1024
"""Blocks of scores whose peaks bound the largest scores: partitioning all of them takes longer than all else."""

BANNED = -1e30
"""The score of a token that must not be sampled, unless a grammar leaves no other: below any logit, and finite."""

_GREEDY_BELOW = 1e-6
"""Float32 has no differences between logits that such a temperature would not make certain."""

_LEAST_PENALTY, _MOST_PENALTY = 1e-6, 1e6
"""Beyond these, penalized logits would not be finite, and no other token would be sampled."""

_STATE_BYTES, _OLD_STATE_BYTES = 32, 5056
"""Sizes of a state of the random generator: now, and of torch's generator in earlier versions."""

_NEUTRAL = {
    "temperature": DEFAULT_TEMPERATURE,
    "top_p": DEFAULT_TOP_P,
    "top_k": DEFAULT_TOP_K,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "dry_multiplier": DEFAULT_DRY_MULTIPLIER,
    "dry_allowed_length": 0,
}
"""What is sampled by unless somebody says otherwise."""

LOOP_LENGTH = 16
"""Tokens that a sequence may repeat back to back before it is taken for a loop, if it is shorter."""

SAID_LENGTH, MAX_SAID_LOSS = 12, 4.0
"""By default, other sequences of so many tokens count a little: sentences are not said again, but code is, in which a
model is surer than that."""

_MAX_DRY_EXCESS = 64

SettingSource = Literal["given", "generation_config", "model", "default"]


class Sampler:
    """Samples tokens for one model.

    Args:
        config: the user's settings. Those that are None come from `recommended`, then from `model_defaults`, then from
            ours. At temperature 0 only the user can ask for a penalty.
        model_defaults: our own defaults of this model, see `config.model_sampling`.

    Attributes:
        seed: the seed in use, random if none was given.
        sources: origin of each setting.
        focused: whether the reply is to follow what was just read or a schema: then our own temperature is at most
            `FOCUSED_TEMPERATURE`.
        forbidden: forbidden for some tokens, the one that must not follow.
        end_tokens: those that end a reply, which are not sampled before `SamplingConfig.min_tokens` others.
        forced: the next tokens, whatever the model would say.
    """

    def __init__(
        self, config: SamplingConfig, recommended: Any, model_defaults: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        self.settings, self.sources = resolve(config, recommended, model_defaults)
        self._temperature, self._top_p = float(self.settings["temperature"]), float(self.settings["top_p"])
        self.focused, self.forbidden = False, dict[int, int]()
        self.end_tokens, self.forced = list[int](), list[int]()
        self._top_k, self._min_p = int(self.settings["top_k"]), float(self.settings["min_p"])
        self.seed = broadcast(secrets.randbits(32)) if config.seed is None else config.seed
        self.greedy = self._temperature < _GREEDY_BELOW
        self._penalty = min(max(float(self.settings["repetition_penalty"]), _LEAST_PENALTY), _MOST_PENALTY)
        self._dry, self._dry_allowed = float(self.settings["dry_multiplier"]), int(self.settings["dry_allowed_length"])
        self._config = config
        self._biased_ids = np.array([token for token, _ in config.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in config.logit_bias], np.float32)
        self._bits = PCG64(self.seed)
        self._random = Generator(self._bits)

    @property
    def rng_state(self) -> RngState:
        """State of the random generator, uint8 [32]: PCG64's state and increment, each little-endian.

        One of an earlier version, [5056], can be set too: it seeds the generator, which then draws other tokens.
        """
        state = self._bits.state["state"]
        return np.frombuffer(b"".join(state[name].to_bytes(16, "little") for name in ("state", "inc")), np.uint8)

    @rng_state.setter
    def rng_state(self, state: RngState) -> None:
        data = state.tobytes()
        if len(data) == _OLD_STATE_BYTES:
            self._bits.state = PCG64(int.from_bytes(hashlib.sha256(data).digest())).state
            return
        bits = self._bits.state
        bits["state"]["state"] = int.from_bytes(data[:16], "little")
        bits["state"]["inc"] = int.from_bytes(data[16:], "little")
        self._bits.state = bits

    def sample(self, logits: Scores, reply: Sequence[int] = (), mask: Callable[[Scores], Scores] | None = None) -> int:
        """The next token.

        Args:
            logits: [V] float32.
            reply: the tokens of the reply so far, to which the penalties apply.
            mask: makes the scores of tokens that must not come next -inf, in a copy.

        Raises:
            H2OStreamError: the logits contain NaN or infinity.
        """
        top = int(logits.argmax())  # a NaN, if there is one
        if not math.isfinite(logits[top]):
            raise H2OStreamError(
                f"the model's logits are not numbers ({logits[top]}): its weights are damaged or overflow their dtype; "
                "try --dtype float32"
            )
        if self.forced:
            return self.forced.pop(0)
        scores = self._biased(logits, reply)
        scores = self._penalized(mask(scores) if mask else scores, reply)
        if reply and (forbidden := self.forbidden.get(reply[-1])) is not None:
            scores = scores.copy()
            scores[forbidden] = BANNED
        if scores is not logits:
            top = int(scores.argmax())
        if self.greedy:
            return top
        ids, scores = self.candidates(scores)
        mass = _relative(scores).cumsum(dtype=np.float64)
        return int(ids[mass.searchsorted(self._random.random() * mass[-1], side="right")])

    def _biased(self, logits: Scores, reply: Sequence[int]) -> Scores:
        """Scores with what was asked for single tokens; without that, the logits themselves."""
        early = len(reply) < self._config.min_tokens
        if not early and not len(self._biases):
            return logits
        scores = logits.copy()
        scores[self._biased_ids] += self._biases
        if early:
            scores[self.end_tokens] = BANNED
        return scores

    def _penalized(self, logits: Scores, reply: Sequence[int]) -> Scores:
        """Scores with all penalties; without any, the logits themselves."""
        count, config, scores = len(reply), self._config, logits
        if config.repeat_last_n >= 0:
            count = min(config.repeat_last_n, count)
        if not count:
            return logits
        tokens = np.array(reply[-count:], dtype=np.int64)
        if self._penalty != 1:
            scores = penalized(scores, tokens, self._penalty)
        if config.frequency_penalty or config.presence_penalty:
            ids, counts = np.unique(tokens, return_counts=True)
            scores = scores.copy()
            scores[ids] -= (config.frequency_penalty * counts + config.presence_penalty).astype(np.float32)
        if self._dry:
            ids, lengths, distances = repeating(tokens)
            losses = _dry_losses(
                self._dry, config.dry_base, lengths, self._dry_allowed or np.maximum(distances, LOOP_LENGTH)
            )
            if not self._dry_allowed:
                repeated = _dry_losses(self._dry, config.dry_base, lengths, SAID_LENGTH)
                losses = np.maximum(losses, np.minimum(repeated, MAX_SAID_LOSS))
            if losses.any():
                loss = np.zeros_like(scores)
                np.maximum.at(loss, ids, losses)
                scores = scores - loss
        return scores

    @property
    def _temperature_now(self) -> float:
        ours = self.sources["temperature"] in ("default", "model")
        return min(self._temperature, FOCUSED_TEMPERATURE) if self.focused and ours else self._temperature

    def candidates(self, scores: Scores) -> tuple[TokenIds, Scores]:
        """The tokens that can be sampled, in ascending order, and their scores, of scores [V] float32."""
        if (temperature := self._temperature_now) != 1:
            peak = scores.max()
            with np.errstate(over="ignore"):  # of tokens without any probability
                if temperature < _LOW_TEMPERATURE or abs(peak) > _HIGH_SCORE:
                    scores = scores - peak
                scores = scores / np.float32(max(temperature, _MIN_TEMPERATURE))
        ids = None
        if self._top_k or self._top_p == 1:
            ids = at_least(scores, largest(scores, self._top_k) if self._top_k else _MIN_SCORE)
            scores = scores[ids]
        if self._top_p < 1:
            kept = nucleus(scores, self._top_p)
            scores, ids = scores[kept], kept if ids is None else ids[kept]
        assert ids is not None
        if self._min_p:
            kept = at_least(_relative(scores), self._min_p)
            scores, ids = scores[kept], ids[kept]
        return ids, scores


def resolve(
    config: SamplingConfig, recommended: Any, model_defaults: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, SettingSource]]:
    """The values to sample by, and where they come from. Arguments as for `Sampler`.

    Raises:
        ConfigError: the model's generation config is out of range.
    """
    settings, sources = dict[str, float](), dict[str, SettingSource]()
    for name, neutral in _NEUTRAL.items():
        given = getattr(config, name)
        candidates: dict[SettingSource, Any] = {
            "given": None if given == BENCH else given,
            "generation_config": getattr(recommended, name, None),
            "model": model_defaults.get(name),
            "default": neutral,
        }
        if name == "repetition_penalty" and settings["temperature"] == 0:
            candidates = {"given": given, "default": neutral}
        if name == "dry_multiplier" and (settings["temperature"] == 0 or sources["repetition_penalty"] != "default"):
            candidates = {"given": given, "default": 0.0}
        sources[name], settings[name] = next(item for item in candidates.items() if item[1] is not None)
    try:
        values: dict[str, Any] = settings
        replace(config, **values)
    except TypeError as error:
        raise ConfigError(f"the model's generation config has {settings}, which are not all numbers") from error
    return settings, sources


def check_rng_state(state: RngState) -> None:
    """Raise H2OStreamError if an array is no `Sampler.rng_state`."""
    if state.dtype != np.uint8 or state.shape not in ((_STATE_BYTES,), (_OLD_STATE_BYTES,)):
        raise H2OStreamError(
            f"the state does not fit: {state.shape} {state.dtype} is not the state of a random generator"
        )


def penalized(scores: Scores, tokens: TokenIds, penalty: float) -> Scores:
    """Scores with a repetition penalty, exactly those of transformers' processor.

    Args:
        scores: [V] float32.
        tokens: [n] int64, in any order and any number of times.
        penalty: above 1 makes these tokens less likely.
    """
    chosen, result = scores[tokens], scores.copy()
    result[tokens] = np.where(chosen < 0, chosen * np.float32(penalty), chosen / np.float32(penalty))
    return result


def repeating(tokens: TokenIds) -> tuple[TokenIds, NDArray[np.int64], NDArray[np.int64]]:
    """For tokens [n] int64, n > 0: those that followed a sequence with which they end, its length, and its distance."""
    ends = (tokens[:-1] == tokens[-1]).nonzero()[0]
    lengths, growing = np.ones_like(ends), np.arange(len(ends))
    for length in range(1, len(tokens)):
        starts = ends[growing] - length
        growing = growing[(starts >= 0) & (tokens[starts] == tokens[-1 - length])]
        if not len(growing):
            break
        lengths[growing] += 1
    return tokens[ends + 1], lengths, len(tokens) - 1 - ends


def _dry_losses(multiplier: float, base: float, lengths: NDArray[np.int64], allowed: NDArray[np.int64] | int) -> Scores:
    """What tokens lose that lengthen sequences, 0 for those that are shorter than is allowed."""
    excess = lengths - allowed
    losses = multiplier * np.power(base, np.clip(excess, 0, _MAX_DRY_EXCESS), dtype=np.float64)
    return np.where(excess < 0, 0, np.minimum(losses, -BANNED)).astype(np.float32)


def nucleus(scores: Scores, top_p: float) -> TokenIds:
    """Indices of the likeliest tokens that together reach `top_p`, below 1, in ascending order. Scores are logits.

    Among equally likely tokens, the first ones are included. All tokens are sorted, as in transformers, only if the
    likely ones are not enough.
    """
    probs = _relative(scores)
    probs /= probs.sum()
    for cutoff in _NUCLEUS_CUTOFFS:
        ids = at_least(probs, cutoff)
        order = ids[(-scores[ids]).argsort(kind="stable")]
        mass = probs[order].cumsum(dtype=np.float64)
        if len(mass) and mass[-1] >= top_p:
            break
    return np.sort(order[: mass.searchsorted(top_p) + 1])


def _relative(scores: Scores) -> Scores:
    """Probabilities by that of the likeliest token, 0 to 1, of scores [n]."""
    ratios: Scores = np.exp(scores - scores.max())
    return ratios


def largest(scores: Scores, count: int) -> float:
    """The smallest of the `count` largest scores. All of them are partitioned only if they are few: that is slow."""
    count, width = min(count, len(scores)), max(len(scores) // _BLOCKS, 1)
    peaks = np.maximum.reduceat(scores, np.arange(0, len(scores), width))
    if count < len(peaks):
        scores = scores[scores >= np.partition(peaks, -count)[-count]]
    return float(np.partition(scores, -count)[-count])


def at_least(scores: Scores, threshold: float) -> TokenIds:
    """Indices of the scores [n] that are at least the threshold, in ascending order."""
    return (scores >= threshold).nonzero()[0]
