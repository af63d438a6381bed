"""How well the next token of a long text is predicted from what each policy keeps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from h2o_stream.cache.attach import attach
from h2o_stream.cache.support import context_of
from h2o_stream.config import CacheConfig
from h2o_stream.errors import ConfigError, DataError

STEP = 256
"""Tokens per forward, about: what the cache does depends on its chunk only."""


@dataclass(frozen=True)
class NllProgress:
    """A part of the text was fed; the figures are of all so far.

    Attributes:
        done: tokens predicted.
        total: tokens to predict.
        nll: mean negative log-likelihood, nats per token.
        nll_last_half: of the second half of `total`; NaN before it begins.
        tok_s: tokens per second.
    """

    done: int
    total: int
    nll: float
    nll_last_half: float
    tok_s: float


def read_tokens(path: Path, tokenizer: Any, count: int) -> list[int]:
    """The first `count` + 1 tokens of a text file: the first one is only ever context.

    Raises:
        DataError: the file cannot be read as UTF-8, or has fewer than two tokens.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"--text {path}: not UTF-8 at byte {error.start}") from error
    except OSError as error:
        raise DataError(f"--text {path}: {error.strerror or error}") from error
    tokens = list(tokenizer(text)["input_ids"][: count + 1])
    if len(tokens) < 2:
        raise DataError(f"--text {path}: {len(tokens)} tokens, at least 2 are needed to predict one")
    return tokens


def within_context(model: Any, config: CacheConfig, tokens: Sequence[int]) -> Sequence[int]:
    """The tokens a policy is compared on: a full cache knows nothing beyond the model's context."""
    context = context_of(model.config)
    return tokens if config.policy != "full" or context is None else tokens[: context + 1]


@torch.no_grad()
def stream_nll(model: Any, config: CacheConfig, tokens: Sequence[int]) -> Iterator[NllProgress]:
    """Feed a text through a cache and score every token by the distribution before it.

    Args:
        model: a causal language model of transformers.
        config: the policy under test. Its chunk is the number of tokens between two evictions; 1 is exactly
            what decoding does.
        tokens: at least two.

    Yields:
        The figures so far, after each forward; the last one is the result.
    """
    if config.chunk == 0:
        raise ConfigError("chunk is 0; a streamed text needs a --chunk of at least 1")
    total, losses, elapsed_s = len(tokens) - 1, torch.empty(0), 0.0
    ids = torch.tensor([list(tokens)], device=model.device)
    with attach(model, config) as cache:
        chunk = cache.plan.chunk
        step = math.ceil(STEP / chunk) * chunk
        for start in range(0, total, step):
            end, begun = min(start + step, total), time.perf_counter()
            logits = model(ids[:, start:end], past_key_values=cache, use_cache=True).logits[0].float()
            losses = torch.cat((losses, cross_entropy(logits, ids[0, start + 1 : end + 1], reduction="none").cpu()))
            elapsed_s += time.perf_counter() - begun
            yield NllProgress(
                done=end,
                total=total,
                nll=float(losses.double().mean()),
                nll_last_half=float(losses[total // 2 :].double().mean()),
                tok_s=end / elapsed_s,
            )
