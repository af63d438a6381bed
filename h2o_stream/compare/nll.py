"""Loss on long texts, streamed through the cache of each policy."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from h2o_stream.attachment.attach import attach
from h2o_stream.attachment.model_facts import context_of, input_device
from h2o_stream.compare.catalog import NllOptions
from h2o_stream.compare.comparison import Comparison, Job, JobProgress, Notify, label_of
from h2o_stream.compare.folder import JobResult
from h2o_stream.compare.masking import MaskedStream, Rule, masked_attention, masked_plan, policy_rule
from h2o_stream.config import CacheConfig, CachePlan
from h2o_stream.errors import ConfigError, DataError
from h2o_stream.texts import read_text

STEP = 256
"""Approximate tokens per forward. What the cache does depends on its chunk only."""

_POINTS = 100
"""Points of the curve in a record."""


BLOCK = 64
"""Tokens resampled together for intervals, since the losses of neighbouring tokens are not independent."""

_RESAMPLES = 2000


class Nll(Comparison[NllOptions]):
    """Every policy on every text, on identical tokens: those of `NllOptions.tokens`, or as many as a text has."""

    name = "nll"

    _streams: list[list[int]]

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Load the model and read the texts."""
        if self.options.masked:
            for config in self.configs:
                if config.policy != "full":
                    policy_rule(masked_plan(config))
        settings = self.load_model(notify)
        self._streams = [read_tokens(path, self.tokenizer, self.options.tokens) for path in self.options.text]
        return {
            **settings,
            "tokens": self.options.tokens,
            **({"masked": True} if self.options.masked else {}),
            "texts": {
                str(text): digest_of(tokens) for text, tokens in zip(self.options.text, self._streams, strict=True)
            },
        }

    def jobs(self) -> list[Job]:
        """One for each text and policy."""
        return [
            self._job(text.name, config, within_context(self.model, config, stream))
            for text, stream in zip(self.options.text, self._streams, strict=True)
            for config in self.configs
        ]

    def _job(self, text: str, config: CacheConfig, tokens: Sequence[int]) -> Job:
        masked = self.options.masked and config.policy != "full"
        key = self.key(config, tokens=digest_of(tokens), **({"masked": True} if masked else {}))
        run = partial(masked_nll if masked else stream_nll, self.model, config, tokens)
        return Job(f"{text} {label_of(config)}", key, len(tokens) - 1, run, config)

    def records(self, results: Iterable[JobResult]) -> Iterator[dict[str, Any]]:
        """One for each text and policy."""
        pairs = [(text, config) for text in self.options.text for config in self.configs]
        full: Tensor | None = None
        for (text, config), result in zip(pairs, results, strict=True):
            losses = result.values
            to_full = None
            if config.policy == "full":
                full = losses
            elif self.configs[0].policy == "full":
                assert full is not None
                to_full = paired_difference(losses, full)._asdict()
            yield {
                "type": self.name,
                "text": str(text),
                "policy": config.name,
                "window": None if config.policy == "full" else result.figures["window"],
                "cache_size": config.cache_size,
                "cache_bytes": result.figures["cache_bytes"],
                "tokens": len(losses),
                "nll": float(losses.double().mean()),
                "nll_last_half": float(losses[len(losses) // 2 :].double().mean()),
                "tok_s": round(result.figures["tok_s"], 2),
                "seed": config.seed,
                "to_full": to_full,
                "rolling": _rolling(losses),
            }


class Interval(NamedTuple):
    """A mean and its 95% interval."""

    mean: float
    low: float
    high: float


def paired_difference(ours: Tensor, theirs: Tensor, seed: int = 0) -> Interval:
    """The mean of ours - theirs, losses [n] and [m] of the same tokens, with its 95% interval. The longer one is
    truncated.
    """
    length = min(len(ours), len(theirs))
    difference = (ours[:length] - theirs[:length]).double()
    blocks = difference.split(BLOCK)
    sums = torch.stack([block.sum() for block in blocks])
    return ratio_interval(sums, torch.tensor([len(block) for block in blocks], dtype=torch.float64), seed)


def ratio_interval(numerators: Tensor, denominators: Tensor, seed: int = 0) -> Interval:
    """The ratio of two sums, each of [n] float64, with its 95% interval: a bootstrap over the units summed."""
    count = len(numerators)
    samples = torch.randint(count, (_RESAMPLES, count), generator=torch.Generator().manual_seed(seed))
    ratios = numerators[samples].sum(1) / denominators[samples].sum(1)
    low, high = torch.quantile(ratios, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(float(numerators.sum() / denominators.sum()), low, high)


def digest_of(tokens: Sequence[int]) -> str:
    """A digest of a text."""
    return hashlib.sha256(str(list(tokens)).encode()).hexdigest()[:20]


def _rolling(losses: Tensor) -> dict[str, Any]:
    """The rolling mean of the losses by tokens seen, at `_POINTS` points or fewer."""
    width = min(max(len(losses) // 16, 64), len(losses))
    sums = torch.cat((torch.zeros(1, dtype=torch.float64), losses.double().cumsum(0)))
    means = (sums[width:] - sums[:-width]) / width
    stride = math.ceil(len(means) / _POINTS)
    seen = range(width, len(losses) + 1)[::stride]
    return {"width": width, "seen": list(seen), "nll": [round(value, 3) for value in means[::stride].tolist()]}


def read_tokens(path: Path, tokenizer: Any, count: int) -> list[int]:
    """The first `count` + 1 tokens of a text file; the first one is context only.

    Raises:
        DataError: the file cannot be read as UTF-8, or has fewer than two tokens.
    """
    text = read_text(path, f"--text {path}")
    tokens = list(tokenizer(text)["input_ids"][: count + 1])
    if len(tokens) < 2:
        raise DataError(f"--text {path}: {len(tokens)} tokens, at least 2 are needed to predict one")
    return tokens


def within_context(model: Any, config: CacheConfig, tokens: Sequence[int]) -> Sequence[int]:
    """The tokens that a policy is scored on; a full cache stops at the model's context."""
    context = context_of(model.config)
    return tokens if config.policy != "full" or context is None else tokens[: context + 1]


@torch.no_grad()
def stream_nll(
    model: Any, config: CacheConfig, tokens: Sequence[int], kept: JobResult | None = None
) -> Iterator[JobProgress | JobResult]:
    """Feed two tokens or more through a cache and take the loss of every token, or go on from what was kept.

    The config's chunk is the number of tokens between two evictions; 1 is exactly what decoding does. Yields
    `JobProgress` after each forward, and last the losses, [n] float32 in nats, with ``tok_s``, tokens per second.
    """
    before = kept.figures["seconds"] if kept else 0.0
    start_time, ids = time.perf_counter() - before, torch.tensor([list(tokens)], device=input_device(model))
    with attach(model, config) as cache:
        if kept:
            cache.load_state_dict(kept.state)

        def feed(start: int, end: int) -> Tensor:
            logits: Tensor = model(ids[:, start:end], past_key_values=cache, use_cache=True).logits[0]
            return logits

        chunk = _chunk_of(cache.plan)

        def keep(losses: Tensor) -> JobResult:
            return JobResult({"seconds": time.perf_counter() - start_time}, losses, cache.state_dict())

        losses = yield from _losses(tokens, math.ceil(STEP / chunk) * chunk, feed, keep, kept)
        figures = {"window": cache.plan.window, "cache_bytes": cache.nbytes}
    yield JobResult({**figures, "tok_s": len(losses) / (time.perf_counter() - start_time)}, losses)


def _chunk_of(plan: CachePlan) -> int:
    if not plan.chunk:
        raise ConfigError("chunk is 0; a streamed text needs a --chunk of at least 1")
    return plan.chunk


def _losses(
    tokens: Sequence[int],
    step: int,
    feed: Callable[[int, int], Tensor],
    keep: Callable[[Tensor], JobResult] | None = None,
    kept: JobResult | None = None,
) -> Generator[JobProgress, None, Tensor]:
    """The loss of every token but the first, [n] float32; `feed` returns the logits [m, V] of the tokens from .. to.

    `keep` is given the losses so far, and `kept` has those of an earlier run.
    """
    losses, total = [kept.values] if kept else [], len(tokens) - 1
    for start in range(len(losses[0]) if losses else 0, total, step):
        end = min(start + step, total)
        logits = feed(start, end).float()
        targets = torch.tensor(tokens[start + 1 : end + 1], device=logits.device)
        losses.append(cross_entropy(logits, targets, reduction="none").cpu())
        yield JobProgress(end, keep=keep and (lambda: keep(torch.cat(losses))))
    return torch.cat(losses)


def masked_nll(model: Any, config: CacheConfig, tokens: Sequence[int]) -> Iterator[JobProgress | JobResult]:
    """The losses of a policy that masks tokens instead of dropping them; like `stream_nll`."""
    plan = masked_plan(config)
    yield from ruled_nll(model, plan, policy_rule(plan), tokens)


def ruled_nll(
    model: Any, plan: CachePlan, rule: Rule | None, tokens: Sequence[int]
) -> Iterator[JobProgress | JobResult]:
    """The losses of a text while a rule says what queries see; see `MaskedStream`. Yields what `stream_nll` does."""
    start_time, total, context = time.perf_counter(), len(tokens) - 1, context_of(model.config)
    chunk = _chunk_of(plan)
    if context is not None and total > context:
        raise ConfigError(f"tokens is {total}, the model has {context} positions, which are true here; lower --tokens")
    with masked_attention(model):
        stream = MaskedStream(model, plan, rule)
        losses = yield from _losses(tokens, chunk, lambda start, end: stream.feed(tokens[start:end]))
        figures = {"window": plan.window, "cache_bytes": stream.nbytes}
    yield JobResult({**figures, "tok_s": total / (time.perf_counter() - start_time)}, losses)
