"""Sampling on the device of the logits, so that only the token goes to the host.

It follows `Sampler.candidates` with masks in place of lists, as sizes that depend on numbers would wait for the device:
while the device is still busy with a step, all of this is queued behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy
import torch
from torch import Tensor

from h2o_stream.engine.logits import (
    HIGH_SCORE,
    LOW_TEMPERATURE,
    MIN_TEMPERATURE,
    Changes,
    Draw,
    Logits,
    Scores,
    changed,
)


class TensorLogits:
    """See `DeviceLogits`.

    Args:
        logits: [V] float32.
    """

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Scores:
        scores: Scores = self._logits.cpu().numpy()
        return scores

    def copy(self) -> Self:
        """The same: they are not overwritten."""
        return self

    @torch.no_grad()
    def sample(self, changes: Sequence[Changes | None], draw: Draw | None) -> tuple[int, float]:
        """The next token, and the largest logit."""
        scores = self._logits
        for change in filter(None, changes):
            ids, factors, added, banned = (torch.from_numpy(x).to(scores.device, non_blocking=True) for x in change)
            scores = scores.index_copy(0, ids, changed(scores[ids], factors, added, banned, torch.where))
        token = scores.argmax() if draw is None else _drawn(scores, draw)
        number, peak = torch.stack([token.double(), self._logits.max().double()]).tolist()
        return min(int(number), len(scores) - 1), peak


def as_logits(row: Tensor) -> Logits:
    """Logits [V] float32: where they are, on a GPU, so that nothing waits for them."""
    logits = TensorLogits(row)
    return logits if row.device.type == "cuda" else numpy.asarray(logits)


class DeviceClock:
    """A context that times what a GPU does in it, without waiting.

    Attributes:
        seconds: of the last time that was read.
    """

    seconds: float | None = None

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._timed = False

    def __enter__(self) -> None:
        for event in self._events[:1]:
            event.record()

    def __exit__(self, *_: object) -> None:
        for event in self._events[1:]:
            event.record()
            self._timed = True

    def read(self) -> None:
        """Read what was timed before, which is over where a token was sampled after it."""
        if self._timed and self._events[1].query():
            self.seconds = self._events[0].elapsed_time(self._events[1]) / 1000


def _drawn(scores: Tensor, draw: Draw) -> Tensor:
    """A token [] by its score [V]."""
    peak = scores.max()
    if draw.temperature != 1:
        far = torch.full_like(peak, draw.temperature < LOW_TEMPERATURE, dtype=torch.bool) | (peak.abs() > HIGH_SCORE)
        # By a tensor: a number would be inverted first, and other quotients give other tokens than on the host.
        scores = torch.where(far, scores - peak, scores) / torch.full_like(peak, max(draw.temperature, MIN_TEMPERATURE))
    relative = (scores - scores.max()).exp()
    kept = relative > 0
    if draw.top_k:
        kept &= scores >= scores.topk(min(draw.top_k, len(scores))).values[-1]
    if draw.top_p < 1:
        order = scores.where(kept, -torch.inf).sort(descending=True, stable=True).indices
        probs = relative.where(kept, 0.0)
        before = (probs / probs.sum())[order].cumsum(0, dtype=torch.float64).roll(1)
        before[:1] = 0
        kept &= torch.empty_like(kept).index_copy_(0, order, before < draw.top_p)
    if draw.min_p:
        kept &= relative >= draw.min_p
    mass = relative.where(kept, 0.0).cumsum(0, dtype=torch.float64)
    return torch.searchsorted(mass, draw.place * mass[-1:], right=True)[0]
