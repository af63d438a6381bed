"""The losses of a text that is read chunk by chunk, whatever computes them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import numpy
from numpy.typing import NDArray

from h2o_stream.compare.comparison import JobProgress
from h2o_stream.compare.folder import JobResult
from h2o_stream.config import CachePlan
from h2o_stream.errors import ConfigError

Losses = NDArray[numpy.float32]


def chunk_of(plan: CachePlan) -> int:
    """Tokens between two evictions; raises ConfigError if it is not a number of them."""
    if not plan.chunk:
        raise ConfigError("chunk is 0; a streamed text needs a --chunk of at least 1")
    return plan.chunk


def losses_of(
    tokens: Sequence[int],
    step: int,
    feed: Callable[[Sequence[int], Sequence[int]], Losses],
    keep: Callable[[Losses], JobResult] | None = None,
    kept: JobResult | None = None,
) -> Generator[JobProgress, None, Losses]:
    """The loss of every token but the first, [n] float32; `feed` returns those of the tokens that follow given ones.

    `keep` is given the losses so far, and `kept` has those of an earlier run.
    """
    losses, total = [kept.values] if kept else [], len(tokens) - 1
    for start in range(len(losses[0]) if losses else 0, total, step):
        end = min(start + step, total)
        losses.append(feed(tokens[start:end], tokens[start + 1 : end + 1]))
        yield JobProgress(end, keep=keep and (lambda: keep(numpy.concatenate(losses))))
    return numpy.concatenate(losses)
