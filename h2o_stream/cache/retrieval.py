"""Windows by what each KV head attends to in a text that it has read before; imports no torch.

Most heads attend to the first tokens and to recent ones; a few find a passage from long ago and copy it. Such heads
can be found without any text: in a repeated random sequence they attend to the previous occurrence of the present token
and to what came after it (induction heads, arXiv 2209.11895). `attachment.retrieval_heads` measures transformers models
so, `runtime.heads` those that are described from files.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

import numpy
from numpy.typing import NDArray

from h2o_stream.cache.windows import HeadWindow

PERIOD = 256
"""Tokens of a random sequence; it is read twice."""

_ROWS = 2
"""Random sequences."""

_LARGE = 10**9
"""Weights of a model that gets one sequence."""

_FLOOR = 0.3
"""Fraction of an equal window that every head keeps."""

_MIN_RETRIEVAL = 0.2
"""Attention to the copy that a retrieval head pays at least; a model without such heads gets equal windows."""

_STEP = 1.25
"""Ratio between the shares of two head groups: heads of a layer whose shares round to the same power form one."""


def num_rows(weights: int) -> int:
    """Random sequences for a model of so many weights: with a large one, a single sequence finds nearly all heads."""
    return _ROWS if weights < _LARGE else 1


def repeated_tokens(vocabulary: int, rows: int, context: int | None) -> NDArray[numpy.int64]:
    """Random tokens [rows, 2 * period] int64 that come twice, for a model trained for `context` positions."""
    period = min(PERIOD, (context or 2 * PERIOD) // 2)
    draws = numpy.random.RandomState(0).randint(0, 2**32, (rows, period), dtype=numpy.uint32)  # those of torch
    once = draws.astype(numpy.int64) % vocabulary
    return numpy.concatenate((once, once), 1)


def retrieval_windows(retrieval: NDArray[numpy.float32]) -> list[tuple[HeadWindow, ...]]:
    """The windows of the heads of each layer, from their attention to the copy: [layers, Hkv] float32.

    A window of w tokens misses a fraction of what a head attends to sharply that falls about as 1/w. The total is
    smallest if windows grow with the square root of what each head would miss (docs/fidelity.md).
    """
    retrieves = float(retrieval.max()) >= _MIN_RETRIEVAL
    need = numpy.sqrt(retrieval) if retrieves else numpy.ones_like(retrieval)
    shares = (_FLOOR + (1 - _FLOOR) * need / need.mean()).tolist()
    layers = [_grouped(layer) for layer in shares]
    groups = [group for layer in layers for group in layer]
    mean = fmean([group.share for group in groups], [group.weight for group in groups])
    return [tuple(HeadWindow(group.heads, group.share / mean) for group in layer) for layer in layers]


def _grouped(shares: Sequence[float]) -> tuple[HeadWindow, ...]:
    """The heads of a layer in groups of about the same share."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for head, share in enumerate(shares):
        groups[round(math.log(share, _STEP))].append(head)
    # Sixteenths, so that another dtype or machine seldom gives another result.
    return tuple(
        HeadWindow(tuple(heads), round(16 * fmean(shares[head] for head in heads)) / 16)
        for _, heads in sorted(groups.items())
    )
