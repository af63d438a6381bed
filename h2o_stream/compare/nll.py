"""Loss on long texts, streamed through the cache of each policy."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from h2o_stream.base.progress import ignore
from h2o_stream.base.texts import read_text
from h2o_stream.compare.catalog import NllOptions
from h2o_stream.compare.comparison import Comparison, Job, JobProgress, Notify, label_of
from h2o_stream.compare.folder import JobResult
from h2o_stream.compare.losses import Losses, chunk_of, losses_of
from h2o_stream.compare.models import cache_bytes, context_of
from h2o_stream.config import CacheConfig, EngineChoice
from h2o_stream.engine.served import serve
from h2o_stream.errors import DataError

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
    native = True

    _streams: list[list[int]]

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Load the model and read the texts."""
        settings = self.load_model(notify)
        self._streams = [read_tokens(path, self.tokenizer, self.options.tokens) for path in self.options.text]
        return {
            **settings,
            "tokens": self.options.tokens,
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
        key = self.key(config, tokens=digest_of(tokens))
        return Job(f"{text} {label_of(config)}", key, len(tokens) - 1, partial(self.run, config, tokens), config)

    def run(
        self, config: CacheConfig, tokens: Sequence[int], kept: JobResult | None = None
    ) -> Iterator[JobProgress | JobResult]:
        """The losses of a policy on a text."""
        return stream_nll(*self.model_for(config), tokens, kept, self.options.engine)

    def records(self, results: Iterable[JobResult]) -> Iterator[dict[str, Any]]:
        """One for each text and policy."""
        pairs = [(text, config) for text in self.options.text for config in self.configs]
        full: Losses | None = None
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
                "policy": config.policy,
                "window": None if config.policy == "full" else result.figures["window"],
                "cache_size": config.cache_size,
                "cache_bytes": result.figures["cache_bytes"],
                "tokens": len(losses),
                "nll": float(losses.mean(dtype=float)),
                "nll_last_half": float(losses[len(losses) // 2 :].mean(dtype=float)),
                "tok_s": round(result.figures["tok_s"], 2),
                "seed": config.seed,
                "steps": result.figures["steps"],
                "to_full": to_full,
                "rolling": _rolling(losses),
            }


class Interval(NamedTuple):
    """A mean and its 95% interval."""

    mean: float
    low: float
    high: float


def paired_difference(ours: Losses, theirs: Losses, seed: int = 0) -> Interval:
    """The mean of ours - theirs, losses [n] and [m] of the same tokens, with its 95% interval. The longer one is
    truncated.
    """
    length = min(len(ours), len(theirs))
    difference = (ours[:length] - theirs[:length]).astype(float)
    starts = numpy.arange(0, length, BLOCK)
    return ratio_interval(numpy.add.reduceat(difference, starts), numpy.diff(starts, append=length), seed)


def ratio_interval(numerators: NDArray[Any], denominators: NDArray[Any], seed: int = 0) -> Interval:
    """The ratio of two sums, each of [n] numbers, with its 95% interval: a bootstrap over the units summed."""
    count = len(numerators)
    samples = numpy.random.default_rng(seed).integers(count, size=(_RESAMPLES, count))
    ratios = numerators[samples].sum(1) / denominators[samples].sum(1)
    low, high = numpy.quantile(ratios, (0.025, 0.975)).tolist()
    return Interval(float(numerators.sum() / denominators.sum()), low, high)


def digest_of(tokens: Sequence[int]) -> str:
    """A digest of a text."""
    return hashlib.sha256(str(list(tokens)).encode()).hexdigest()[:20]


def _rolling(losses: Losses) -> dict[str, Any]:
    """The rolling mean of the losses by tokens seen, at `_POINTS` points or fewer."""
    width = min(max(len(losses) // 16, 64), len(losses))
    sums = numpy.concatenate(([0.0], losses.cumsum(dtype=float)))
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
    context = context_of(model)
    return tokens if config.policy != "full" or context is None else tokens[: context + 1]


def stream_nll(
    model: Any,
    config: CacheConfig,
    tokens: Sequence[int],
    kept: JobResult | None = None,
    engine: EngineChoice = "auto",
) -> Iterator[JobProgress | JobResult]:
    """Feed two tokens or more through a cache and take the loss of every token, or go on from what was kept.

    The config's chunk is the number of tokens between two evictions; 1 is exactly what decoding does. Yields
    `JobProgress` after each forward, and last the losses, [n] float32 in nats, with ``tok_s``, tokens per second.
    """
    before = kept.figures["seconds"] if kept else 0.0
    start_time = time.perf_counter() - before
    with closing(serve(model, config, engine, ignore)) as served:
        if kept:
            served.load_state_dict(kept.state)
        cache = served.cache
        chunk = chunk_of(cache.plan)

        def keep(losses: Losses) -> JobResult:
            return JobResult({"seconds": time.perf_counter() - start_time}, losses, served.state_dict())

        losses = yield from losses_of(tokens, math.ceil(STEP / chunk) * chunk, served.losses, keep, kept)
        figures = {"window": cache.plan.window, "cache_bytes": cache_bytes(cache), "steps": cache.engine_note}
    yield JobResult({**figures, "tok_s": len(losses) / (time.perf_counter() - start_time)}, losses)
