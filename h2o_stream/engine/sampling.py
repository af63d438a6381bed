"""Draws the next token with transformers' own logits processors."""

from __future__ import annotations

import secrets
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from h2o_stream.config import DEFAULT_TEMPERATURE, DEFAULT_TOP_K, DEFAULT_TOP_P, SamplingConfig
from h2o_stream.processes import agreed

_LIKELY = 512
"""Tokens among which the nucleus nearly always is."""


class Nucleus(TopPLogitsWarper):
    """transformers' top-p, which sorts the whole vocabulary only where the likeliest tokens are not enough."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[B, V] scores, -inf outside the nucleus."""
        likely, places = scores.topk(min(_LIKELY, scores.shape[-1]))
        mass = (likely - scores.logsumexp(-1, keepdim=True)).exp().cumsum(-1)
        if bool((mass[:, -1] < self.top_p).any()):
            sorted_by_them: Tensor = super().__call__(input_ids, scores)
            return sorted_by_them
        beyond = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), -1) >= self.top_p
        return torch.full_like(scores, -torch.inf).scatter_(-1, places, likely.masked_fill(beyond, -torch.inf))


class Sampler:
    """A sampling config made ready for a model.

    Args:
        config: what the user said; what is None comes from `recommended`, then from our defaults.
        recommended: the model's generation config, or None.
        device: where the logits are.

    Attributes:
        seed: the seed in use, drawn if none was given.
    """

    def __init__(self, config: SamplingConfig, recommended: Any, device: torch.device) -> None:
        def choose(name: str, default: float) -> Any:
            given = getattr(config, name)
            return next(v for v in (given, getattr(recommended, name, None), default) if v is not None)

        temperature = choose("temperature", DEFAULT_TEMPERATURE)
        top_k, top_p = choose("top_k", DEFAULT_TOP_K), choose("top_p", DEFAULT_TOP_P)
        self.seed = agreed(secrets.randbits(32)) if config.seed is None else config.seed
        self.greedy = temperature == 0
        self._generator = torch.Generator(device=device).manual_seed(self.seed)
        self._processors = LogitsProcessorList()
        if config.repetition_penalty != 1:
            self._processors.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
        if not self.greedy:
            if temperature != 1:
                self._processors.append(TemperatureLogitsWarper(float(temperature)))
            if top_k:
                self._processors.append(TopKLogitsWarper(top_k))
            if top_p < 1:
                self._processors.append(Nucleus(float(top_p)))
            if config.min_p:
                self._processors.append(MinPLogitsWarper(config.min_p))

    @property
    def state(self) -> Tensor:
        """uint8, where the random draws have come to."""
        return self._generator.get_state()

    @state.setter
    def state(self, state: Tensor) -> None:
        self._generator.set_state(state)

    def draw(self, logits: Tensor, tokens: list[int]) -> int:
        """The next token.

        Args:
            logits: [V], any float dtype.
            tokens: what the repetition penalty looks at: the turn so far.
        """
        history = torch.tensor([tokens], dtype=torch.int64, device=logits.device)
        scores = self._processors(history, logits[None].float())[0]
        if self.greedy:
            return int(scores.argmax())
        possible = scores.isfinite().nonzero()[:, 0]
        return int(possible[torch.multinomial(scores[possible].softmax(-1), 1, generator=self._generator)])
