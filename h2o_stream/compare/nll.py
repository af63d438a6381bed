"""How well the next token of a long text is predicted from what each policy keeps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from h2o_stream.cache.attach import attach
from h2o_stream.cache.support import context_of
from h2o_stream.config import CacheConfig
from h2o_stream.errors import ConfigError, DataError
from h2o_stream.resources import read_text

STEP = 256
"""Tokens per forward, about: what the cache does depends on its chunk only."""


@dataclass(frozen=True)
class NllProgress:
    """Tokens predicted so far."""

    done: int
    total: int


@dataclass(frozen=True)
class NllResult:
    """A whole text.

    Attributes:
        losses: [n] float32, the negative log-likelihood of each token, nats.
        tok_s: tokens per second.
    """

    losses: Tensor
    tok_s: float

    @property
    def nll(self) -> float:
        """Their mean."""
        return float(self.losses.double().mean())

    @property
    def nll_last_half(self) -> float:
        """The mean of their second half."""
        return float(self.losses[len(self.losses) // 2 :].double().mean())


def read_tokens(path: Path, tokenizer: Any, count: int) -> list[int]:
    """The first `count` + 1 tokens of a text file: the first one is only ever context.

    Raises:
        DataError: the file cannot be read as UTF-8, or has fewer than two tokens.
    """
    text = read_text(path, f"--text {path}")
    tokens = list(tokenizer(text)["input_ids"][: count + 1])
    if len(tokens) < 2:
        raise DataError(f"--text {path}: {len(tokens)} tokens, at least 2 are needed to predict one")
    return tokens


def within_context(model: Any, config: CacheConfig, tokens: Sequence[int]) -> Sequence[int]:
    """The tokens a policy is compared on: a full cache knows nothing beyond the model's context."""
    context = context_of(model.config)
    return tokens if config.policy != "full" or context is None else tokens[: context + 1]


@torch.no_grad()
def stream_nll(model: Any, config: CacheConfig, tokens: Sequence[int]) -> Iterator[NllProgress | NllResult]:
    """Feed a text through a cache and score every token by the distribution before it.

    Args:
        model: a causal language model of transformers.
        config: the policy under test. Its chunk is the number of tokens between two evictions; 1 is exactly
            what decoding does.
        tokens: at least two.

    Yields:
        `NllProgress` after each forward, and last the `NllResult`.
    """
    if config.chunk == 0:
        raise ConfigError("chunk is 0; a streamed text needs a --chunk of at least 1")
    total, losses, begun = len(tokens) - 1, list[Tensor](), time.perf_counter()
    ids = torch.tensor([list(tokens)], device=model.device)
    with attach(model, config) as cache:
        chunk = cache.plan.chunk
        step = math.ceil(STEP / chunk) * chunk
        for start in range(0, total, step):
            end = min(start + step, total)
            logits = model(ids[:, start:end], past_key_values=cache, use_cache=True).logits[0].float()
            losses.append(cross_entropy(logits, ids[0, start + 1 : end + 1], reduction="none").cpu())
            yield NllProgress(end, total)
    yield NllResult(torch.cat(losses), total / (time.perf_counter() - begun))
