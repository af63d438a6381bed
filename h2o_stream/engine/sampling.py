"""Draws the next token: repetition penalty, temperature, top-k, top-p and min-p, as transformers' processors do.

Between two steps nothing may wake torch's threads: they spin on the cores that the next step needs. So a draw runs on
one thread, and few of its operations touch the whole vocabulary.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, TopPLogitsWarper

from h2o_stream.config import DEFAULT_TEMPERATURE, DEFAULT_TOP_K, DEFAULT_TOP_P, SamplingConfig
from h2o_stream.errors import H2OStreamError
from h2o_stream.processes import broadcast

_LIKELY = {1e-4: torch.float32, 1e-6: torch.float64}
"""Probabilities: the nucleus is looked for among the tokens above the first, then above the second, then among all; and
what is precise enough to add them up."""

LOWEST = torch.finfo(torch.float32).min
"""All scores but -inf are at least this."""


class Sampler:
    """A sampling config made ready for a model.

    Args:
        config: what the user said; what is None comes from `recommended`, then from our defaults.
        recommended: the model's generation config, or None.

    Attributes:
        seed: the seed in use, drawn if none was given.
    """

    def __init__(self, config: SamplingConfig, recommended: Any) -> None:
        def choose(name: str, default: float) -> Any:
            given = getattr(config, name)
            return next(v for v in (given, getattr(recommended, name, None), default) if v is not None)

        self._temperature = float(choose("temperature", DEFAULT_TEMPERATURE))
        self._top_k, self._top_p = int(choose("top_k", DEFAULT_TOP_K)), float(choose("top_p", DEFAULT_TOP_P))
        self._min_p = config.min_p
        self.seed = broadcast(secrets.randbits(32)) if config.seed is None else config.seed
        self.greedy = self._temperature == 0
        self._generator = torch.Generator().manual_seed(self.seed)
        self._penalty = None
        if config.repetition_penalty != 1:
            self._penalty = RepetitionPenaltyLogitsProcessor(config.repetition_penalty)

    @property
    def state(self) -> Tensor:
        """uint8, where the random draws have come to: the CPU's, wherever the logits are."""
        return self._generator.get_state()

    @state.setter
    def state(self, state: Tensor) -> None:
        self._generator.set_state(state)

    def draw(self, logits: Tensor, tokens: list[int]) -> int:
        """The next token.

        Args:
            logits: [V], any float dtype.
            tokens: what the repetition penalty looks at: the turn so far.

        Raises:
            H2OStreamError: there are NaNs among the logits.
        """
        with one_thread():
            scores = logits.float()
            top = largest(scores)  # NaN, if there is one
            if math.isnan(scores[top].item()):
                raise H2OStreamError(
                    "the model's logits are not numbers (NaN): its weights are damaged, or their type is too narrow "
                    "for it; try --dtype float32"
                )
            if self._penalty is not None:
                history = torch.tensor([tokens], dtype=torch.int64, device=logits.device)
                scores = self._penalty(history, scores[None])[0]
                top = largest(scores)
            if self.greedy:
                return top
            ids, scores = self.possible(scores)
            place = torch.multinomial(scores.softmax(-1).cpu(), 1, generator=self._generator)
            return int(ids[int(place)])

    def possible(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Which tokens can be drawn, in ascending order, and their scores.

        Args:
            scores: [V] float32.
        """
        if self._temperature != 1:
            scores = scores / self._temperature
        ids = None
        if self._top_k or self._top_p == 1:
            least = scores.topk(min(self._top_k, len(scores))).values[-1].item() if self._top_k else LOWEST
            ids = at_least(scores, least)
            scores = scores[ids]
        if self._top_p < 1:
            inside = nucleus(scores, self._top_p)
            scores, ids = scores[inside], inside if ids is None else ids[inside]
        assert ids is not None
        if self._min_p:
            probs = scores.softmax(-1)
            inside = at_least(probs, (self._min_p * probs.max()).item())
            scores, ids = scores[inside], ids[inside]
        return ids, scores


def check_draws(state: Tensor) -> None:
    """Try a `Sampler.state` from elsewhere.

    Raises:
        H2OStreamError: it is not one.
    """
    try:
        torch.Generator().set_state(state)
    except (RuntimeError, TypeError) as error:
        raise H2OStreamError(
            f"the state does not fit: {tuple(state.shape)} {state.dtype} are not the random draws of a CPU"
        ) from error


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Indices of the likeliest tokens that together reach `top_p`, in ascending order.

    Of tokens that are equally likely the first ones are inside. Sorts the whole vocabulary, as transformers does, only
    where the likely tokens are not enough.

    Args:
        scores: [V] float32, logits.
        top_p: below 1.
    """
    for least, dtype in _LIKELY.items():
        total = scores.to(dtype).logsumexp(-1).item()
        places = at_least(scores, total + math.log(least))
        likely, order = scores[places].sort(descending=True, stable=True)
        mass = (likely.to(dtype) - total).exp_().cumsum(-1)
        if len(mass) and mass[-1].item() >= top_p:
            count = int(torch.searchsorted(mass, top_p)) + 1
            return places[order[:count].sort().values]
    whole = TopPLogitsWarper(top_p)(scores[None, :0].long(), scores[None])[0]
    return at_least(whole, LOWEST)


def largest(scores: Tensor) -> int:
    """Index of the largest score, the first of equal ones; of NaN, if there is one."""
    if scores.device.type == "cpu":
        return int(scores.numpy().argmax())  # eight times faster than torch's on one thread
    return int(scores.argmax())


def at_least(scores: Tensor, least: float) -> Tensor:
    """Indices of the scores [n] that are no lower than this, in ascending order."""
    if scores.device.type == "cpu":
        return torch.from_numpy((scores.numpy() >= least).nonzero()[0])  # as above
    return (scores >= least).nonzero()[:, 0]


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on this thread alone; its other threads keep sleeping."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
