"""Guesses in the slots of a stream on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.gpu.packed import FEW
from h2o_stream.native.lookahead import Passes

PASSES = FEW, FEW // 2
"""Numbers of tokens that go through the model at once, each captured as a graph of its own."""


class PassSteps(Protocol):
    """Steps that take passes of the one stream of a cache."""

    cache: H2OCache

    def pass_size(self, tokens: int) -> int:
        """How many tokens, at most so many, can go through the model at once."""

    def run_pass(self, ids: Sequence[int]) -> Tensor:
        """Take `pass_size` tokens through the model, counting none: [n, V] float32 logits after each."""

    def release(self) -> None:
        """Free what steps and passes have recorded."""

    def take_back(self, count: int, kept: int) -> None:
        """Of the `count` tokens of the last pass only the first ones stay in the slots."""


class GpuPasses(Passes[Tensor]):
    """Passes of fused steps."""

    def __init__(self, steps: PassSteps) -> None:
        super().__init__(steps.cache)
        self._steps = steps

    def release(self) -> None:
        """Free what steps and passes have allocated."""
        self.take_back()
        self._logits = torch.empty(0)
        self._steps.release()

    @property
    def _max_guesses(self) -> int:
        return max(PASSES) - 1

    def _begin(self, ids: Sequence[int]) -> int:
        self._cache.prepare(1)
        size = self._steps.pass_size(len(ids))
        if size:
            self._logits = self._steps.run_pass(ids[:size])
        return size

    def _keep(self, count: int, kept: int) -> None:
        if kept < count:
            self._steps.take_back(count, kept)

    def _count(self) -> Tensor:
        self._cache.prepare(1)
        self._cache.count_token()
        return self._logits[self._taken]
