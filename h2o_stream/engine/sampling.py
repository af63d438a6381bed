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
from h2o_stream.engine.logits import (
    BANNED,
    HIGH_SCORE,
    LOW_TEMPERATURE,
    MIN_TEMPERATURE,
    Changes,
    DeviceLogits,
    Draw,
    Logits,
    Scores,
    TokenIds,
    changed,
)
from h2o_stream.engine.nucleus import at_least, largest, nucleus, relative
from h2o_stream.errors import ConfigError, H2OStreamError

RngState = NDArray[np.uint8]

_MIN_SCORE = float(np.finfo(np.float32).min)
"""All scores but -inf are at least this."""

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
        self._bias_values = np.array([bias for _, bias in config.logit_bias], np.float32)
        self._bits = PCG64(self.seed)
        self._random = Generator(self._bits)
        self._repeated = Repetitions()

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

    def sample(self, logits: Logits, reply: Sequence[int] = (), mask: Callable[[Scores], Scores] | None = None) -> int:
        """The next token.

        Args:
            logits: [V] float32, here or on a device.
            reply: the tokens of the reply so far, to which the penalties apply.
            mask: makes the scores of tokens that must not come next -inf, in a copy.

        Raises:
            H2OStreamError: the logits contain NaN or infinity.
        """
        if not isinstance(logits, np.ndarray):
            if not mask and not self.forced:
                return self._sample_there(logits, reply)
            logits = np.asarray(logits)
        top = int(logits.argmax())  # a NaN, if there is one
        _check(float(logits[top]))
        if self.forced:
            return self.forced.pop(0)
        scores = with_changes(logits, self._biases(reply))
        scores = with_changes(mask(scores) if mask else scores, self._penalties(reply))
        if scores is not logits:
            top = int(scores.argmax())
        if self.greedy:
            return top
        ids, scores = self.candidates(scores)
        mass = relative(scores).cumsum(dtype=np.float64)
        return int(ids[mass.searchsorted(self._random.random() * mass[-1], side="right")])

    def _sample_there(self, logits: DeviceLogits, reply: Sequence[int]) -> int:
        """The next token, chosen where the logits are: the same one, unless rounding decides."""
        draw = None
        if not self.greedy:
            draw = Draw(self._temperature_now, self._top_k, self._top_p, self._min_p, self._random.random())
        token, peak = logits.sample((self._biases(reply), self._penalties(reply)), draw)
        _check(peak)
        return token

    def _biases(self, reply: Sequence[int]) -> Changes | None:
        """What was asked for single tokens."""
        ends = self.end_tokens if len(reply) < self._config.min_tokens else []
        if not ends and not len(self._biased_ids):
            return None
        changes = Changes.none(self._biased_ids, ends)
        changes.added[changes.places(self._biased_ids)] = self._bias_values
        changes.banned[changes.places(ends)] = True
        return changes

    def _penalties(self, reply: Sequence[int]) -> Changes | None:
        """All penalties of a reply, and what must not follow it."""
        config, count = self._config, len(reply)
        if config.repeat_last_n >= 0:
            count = min(config.repeat_last_n, count)
        whole = np.array(reply, np.int64)
        tokens = whole[len(whole) - count :]
        banned = [self.forbidden[token] for token in reply[-1:] if token in self.forbidden]
        distinct = counts = tokens[:0]
        if self._penalty != 1 or config.frequency_penalty or config.presence_penalty:
            distinct, counts = np.unique(tokens, return_counts=True)
        repeated, losses = (
            self._repetitions(whole, count) if self._dry and count else (tokens[:0], np.zeros(0, np.float32))
        )
        if not (banned or len(distinct) or len(repeated)):
            return None
        changes = Changes.none(distinct, repeated, banned)
        lost = np.zeros(len(changes.ids), np.float32)
        np.maximum.at(lost, changes.places(repeated), losses)
        lost[changes.places(distinct)] += config.frequency_penalty * counts + config.presence_penalty
        changes.factors[changes.places(distinct)] = self._penalty
        changes.banned[changes.places(banned)] = True
        return changes._replace(added=-lost)

    def _repetitions(self, reply: TokenIds, count: int) -> tuple[TokenIds, Scores]:
        """Tokens that would lengthen a sequence among the last `count` of a reply, and what they lose."""
        ids, lengths, distances = self._repeated.find(reply, count)
        allowed, base = self._dry_allowed or np.maximum(distances, LOOP_LENGTH), self._config.dry_base
        losses = _dry_losses(self._dry, base, lengths, allowed)
        if not self._dry_allowed:
            repeated = _dry_losses(self._dry, base, lengths, SAID_LENGTH)
            losses = np.maximum(losses, np.minimum(repeated, MAX_SAID_LOSS))
        return ids[losses > 0], losses[losses > 0]

    @property
    def _temperature_now(self) -> float:
        ours = self.sources["temperature"] in ("default", "model")
        return min(self._temperature, FOCUSED_TEMPERATURE) if self.focused and ours else self._temperature

    def candidates(self, scores: Scores) -> tuple[TokenIds, Scores]:
        """The tokens that can be sampled, in ascending order, and their scores, of scores [V] float32."""
        if (temperature := self._temperature_now) != 1:
            peak = scores.max()
            with np.errstate(over="ignore"):  # of tokens without any probability
                if temperature < LOW_TEMPERATURE or abs(peak) > HIGH_SCORE:
                    scores = scores - peak
                scores = scores / np.float32(max(temperature, MIN_TEMPERATURE))
        ids = None
        if self._top_k or self._top_p == 1:
            ids = at_least(scores, largest(scores, self._top_k) if self._top_k else _MIN_SCORE)
            scores = scores[ids]
        if self._top_p < 1:
            kept = nucleus(scores, self._top_p)
            scores, ids = scores[kept], kept if ids is None else ids[kept]
        assert ids is not None
        if self._min_p:
            kept = at_least(relative(scores), self._min_p)
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


def with_changes(scores: Scores, changes: Changes | None) -> Scores:
    """Scores [V] after changes; the same array without any."""
    if changes is None:
        return scores
    ids, factors, added, banned = changes
    scores = scores.copy()
    scores[ids] = changed(scores[ids], factors, added, banned, np.where)
    return scores


def _check(peak: float) -> None:
    if not math.isfinite(peak):
        raise H2OStreamError(
            f"the model's logits are not numbers ({peak}): its weights are damaged or overflow their dtype; "
            "try --dtype float32"
        )


class Repetitions:
    """The sequences with which a reply ends and that it has before: with each token from those of the token before,
    since a reply that says the same again and again has as many as tokens, and as long ones.
    """

    def __init__(self) -> None:
        self._reply = self._lengths = np.zeros(0, np.int64)

    def find(self, reply: TokenIds, count: int) -> tuple[TokenIds, NDArray[np.int64], NDArray[np.int64]]:
        """Among the last `count` tokens of a reply [n] int64, count > 0: those that followed a sequence with which it
        ends, its length, and its distance.
        """
        if not np.array_equal(reply[:-1], self._reply):
            self._lengths = np.zeros(0, np.int64)
            for size in range(2, len(reply)):
                self._append(reply[:size])
        self._append(reply)
        self._reply = reply
        lengths = np.minimum(self._lengths[len(reply) - count :], np.arange(1, count))
        ends = lengths.nonzero()[0]
        return reply[len(reply) - count :][ends + 1], lengths[ends], count - 1 - ends

    def _append(self, reply: TokenIds) -> None:
        longer = np.concatenate([[1], self._lengths + 1])[: len(reply) - 1]
        self._lengths = np.where(reply[:-1] == reply[-1], longer, 0)


def _dry_losses(multiplier: float, base: float, lengths: NDArray[np.int64], allowed: NDArray[np.int64] | int) -> Scores:
    """What tokens lose that lengthen sequences, 0 for those that are shorter than is allowed."""
    excess = lengths - allowed
    losses = multiplier * np.power(base, np.clip(excess, 0, _MAX_DRY_EXCESS), dtype=np.float64)
    return np.where(excess < 0, 0, np.minimum(losses, -BANNED)).astype(np.float32)
