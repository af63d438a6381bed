"""Samples the next token: repetition penalty, temperature, top-k, top-p and min-p, as transformers' processors do.

Sampling must not wake torch's threads: they would spin on the cores that the next step needs. So it runs on one
thread, and few of its operations touch the whole vocabulary.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers.generation.logits_process import TopPLogitsWarper

from h2o_stream.config import BENCH, DEFAULT_TEMPERATURE, DEFAULT_TOP_K, DEFAULT_TOP_P, SamplingConfig
from h2o_stream.errors import H2OStreamError
from h2o_stream.processes import broadcast

_NUCLEUS_CUTOFFS = {1e-4: torch.float32, 1e-6: torch.float64}
"""The nucleus is searched among tokens above the first probability, then above the second, then among all. The dtype is
precise enough to sum them."""

_MIN_SCORE = torch.finfo(torch.float32).min
"""All scores but -inf are at least this."""


_NEUTRAL = {
    "temperature": DEFAULT_TEMPERATURE,
    "top_p": DEFAULT_TOP_P,
    "top_k": DEFAULT_TOP_K,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""What is sampled by unless somebody says otherwise."""

SettingSource = Literal["given", "generation_config", "model", "default"]


class Sampler:
    """Samples tokens for one model.

    Args:
        config: the user's settings. Those that are None come from `recommended`, then from `model_defaults`, then from
            ours. At temperature 0 only the user can ask for a penalty.
        recommended: the model's generation config, or None.
        model_defaults: our own defaults of this model, see `config.model_sampling`.

    Attributes:
        seed: the seed in use, random if none was given.
        sources: where each of them comes from.
    """

    def __init__(
        self, config: SamplingConfig, recommended: Any, model_defaults: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        self.settings, self.sources = resolve(config, recommended, model_defaults)
        self._temperature, self._top_p = float(self.settings["temperature"]), float(self.settings["top_p"])
        self._top_k, self._min_p = int(self.settings["top_k"]), float(self.settings["min_p"])
        self.seed = broadcast(secrets.randbits(32)) if config.seed is None else config.seed
        self.greedy = self._temperature == 0
        self._generator = torch.Generator().manual_seed(self.seed)
        self._penalty = float(self.settings["repetition_penalty"])

    @property
    def rng_state(self) -> Tensor:
        """State of the random generator, uint8. It is a CPU generator, wherever the logits are."""
        return self._generator.get_state()

    @rng_state.setter
    def rng_state(self, state: Tensor) -> None:
        self._generator.set_state(state)

    def sample(self, logits: Tensor, tokens: list[int]) -> int:
        """The next token.

        Args:
            logits: [V], any float dtype.
            tokens: tokens that the repetition penalty applies to: the turn so far.

        Raises:
            H2OStreamError: the logits contain NaN.
        """
        with single_thread():
            scores = logits.float()
            top = argmax(scores)  # a NaN, if there is one
            if math.isnan(scores[top].item()):
                raise H2OStreamError(
                    "the model's logits are not numbers (NaN): its weights are damaged or overflow their dtype; "
                    "try --dtype float32"
                )
            if self._penalty != 1:
                # five times as fast as torch.tensor, which takes more time than the penalty itself
                history = torch.from_numpy(np.array(tokens, dtype=np.int64)).to(scores.device)
                scores = penalized(scores, history, self._penalty)
            if self.greedy:
                return top if self._penalty == 1 else argmax(scores)
            ids, scores = self.candidates(scores)
            choice = torch.multinomial(scores.softmax(-1).cpu(), 1, generator=self._generator)
            return int(ids[int(choice)])

    def candidates(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens that can be sampled, in ascending order, and their scores.

        Args:
            scores: [V] float32.
        """
        if self._temperature != 1:
            scores = scores / self._temperature
        ids = None
        if self._top_k or self._top_p == 1:
            threshold = scores.topk(min(self._top_k, len(scores))).values[-1].item() if self._top_k else _MIN_SCORE
            ids = at_least(scores, threshold)
            scores = scores[ids]
        if self._top_p < 1:
            kept = nucleus(scores, self._top_p)
            scores, ids = scores[kept], kept if ids is None else ids[kept]
        assert ids is not None
        if self._min_p:
            probs = scores.softmax(-1)
            kept = at_least(probs, (self._min_p * probs.max()).item())
            scores, ids = scores[kept], ids[kept]
        return ids, scores


def resolve(
    config: SamplingConfig, recommended: Any, model_defaults: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, SettingSource]]:
    """The values to sample by, and where they come from. Arguments as for `Sampler`."""
    settings, sources = dict[str, float](), dict[str, SettingSource]()
    for name, neutral in _NEUTRAL.items():
        given = getattr(config, name)
        found: dict[SettingSource, Any] = {
            "given": None if given == BENCH else given,
            "generation_config": getattr(recommended, name, None),
            "model": model_defaults.get(name),
            "default": neutral,
        }
        if name == "repetition_penalty" and settings["temperature"] == 0:
            found = {"given": given, "default": neutral}
        sources[name], settings[name] = next(item for item in found.items() if item[1] is not None)
    return settings, sources


def check_rng_state(state: Tensor) -> None:
    """Check that a tensor is a valid `Sampler.rng_state`.

    Raises:
        H2OStreamError: it is not.
    """
    try:
        torch.Generator().set_state(state)
    except (RuntimeError, TypeError) as error:
        raise H2OStreamError(
            f"the state does not fit: {tuple(state.shape)} {state.dtype} is not the state of a CPU random generator"
        ) from error


def penalized(scores: Tensor, tokens: Tensor, penalty: float) -> Tensor:
    """Scores with a repetition penalty, exactly those of transformers' processor in a third of its time.

    Args:
        scores: [V] float32.
        tokens: [n] int64, in any order and any number of times.
        penalty: above 1 makes these tokens less likely.
    """
    chosen = scores[tokens]
    return scores.index_put((tokens,), torch.where(chosen < 0, chosen * penalty, chosen / penalty))


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Indices of the likeliest tokens that together reach `top_p`, in ascending order.

    Among equally likely tokens, the first ones are included. The whole vocabulary is sorted, as in transformers, only
    if the likely tokens are not enough.

    Args:
        scores: [V] float32, logits.
        top_p: below 1.
    """
    for cutoff, dtype in _NUCLEUS_CUTOFFS.items():
        total = scores.to(dtype).logsumexp(-1).item()
        ids = at_least(scores, total + math.log(cutoff))
        likely, order = scores[ids].sort(descending=True, stable=True)
        mass = (likely.to(dtype) - total).exp_().cumsum(-1)
        if len(mass) and mass[-1].item() >= top_p:
            count = int(torch.searchsorted(mass, top_p)) + 1
            return ids[order[:count].sort().values]
    warped = TopPLogitsWarper(top_p)(scores[None, :0].long(), scores[None])[0]
    return at_least(warped, _MIN_SCORE)


def argmax(scores: Tensor) -> int:
    """Index of the largest score, the first one among equals. A NaN counts as the largest."""
    if scores.device.type == "cpu":
        return int(scores.numpy().argmax())  # eight times faster than torch's on one thread
    return int(scores.argmax())


def at_least(scores: Tensor, threshold: float) -> Tensor:
    """Indices of the scores [n] that are at least the threshold, in ascending order."""
    if scores.device.type == "cpu":
        return torch.from_numpy((scores.numpy() >= threshold).nonzero()[0])  # as above
    return (scores >= threshold).nonzero()[:, 0]


@contextmanager
def single_thread() -> Iterator[None]:
    """Run torch on this thread only, so that its other threads stay asleep."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
