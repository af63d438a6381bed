"""Steps of several caches of one model on a GPU: the rows of all streams are multiplied together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, chain, pairwise
from types import SimpleNamespace
from typing import Any, Generic, TypeVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.gpu import available
from h2o_stream.gpu.graphs import GraphSteps
from h2o_stream.gpu.joint_steps import Tables
from h2o_stream.gpu.layers import logits_of, run
from h2o_stream.gpu.steps import FusedSteps
from h2o_stream.native.attention import Attention
from h2o_stream.native.description import Description
from h2o_stream.native.mixers import Mixer
from h2o_stream.native.stepper import PromptPlan

Row = TypeVar("Row")
"""Logits of a stream."""


class FusedBatch(Generic[Row]):
    """See `native.batch.BatchStepper`. Every stream attends to its own cache, and evicts from it, by its own rules.

    Args:
        description: of a model that `layers.why_not` has no objection to.
        captured: whether steps are captured as CUDA graphs, of the same streams as long as they stay together.
        as_logits: makes of [V] float32 what a sampler takes.
    """

    def __init__(self, description: Description, captured: bool, as_logits: Callable[[Tensor], Row]) -> None:
        self._description, self._device = description, description.embedding.weights.device
        self._captured, self._caches, self._as_logits = captured, _Caches(), as_logits
        self._known: Sequence[tuple[ReferenceType[FusedSteps], int]] = ()
        self._graphs: GraphSteps | None = None
        self._tables: Tables = {}

    @torch.no_grad()
    def step(self, steppers: Sequence[FusedSteps]) -> list[Row]:
        """Take a token of each stream through the model, and count it.

        Args:
            steppers: of the caches, each with one row, begun by `FusedSteps.begin_step`.

        Returns:
            Logits of each.
        """
        with self._using(steppers):
            ids = torch.tensor([stepper.ids[0].tolist() for stepper in steppers], device=self._device)
            logits = self._replayed(steppers, ids)
            if logits is None:
                with self._caches.writing():
                    logits = self._step(ids).logits
                    self._caches.count_token()
            return self._rows(logits)

    @torch.no_grad()
    def read(
        self, steppers: Sequence[FusedSteps], tokens: Sequence[Sequence[int]], plans: Sequence[PromptPlan]
    ) -> Iterator[list[Row]]:
        """Take several tokens of each stream through the model at once, and count them.

        Args:
            steppers: of the caches, each with one row, begun by `FusedSteps.begin_prompt`.
            tokens: of each.
            plans: what that has returned.

        Yields:
            Logits after the last token of each.
        """
        with self._using(steppers):
            ids = torch.tensor([*chain.from_iterable(tokens)], device=self._device)[:, None]
            ends = [*accumulate(map(len, tokens), initial=0)]
            parts = [slice(*pair) for pair in pairwise(ends)]

            def mix(number: int, layer: Attention | Mixer, projected: Tensor) -> Tensor:
                out = projected.new_empty(len(projected), layer.out.columns)
                for stepper, part in zip(steppers, parts, strict=True):
                    stepper.attention.prompt(number, layer, projected[part], out[part])
                return out

            with self._caches.writing():
                stream = run(self._description, ids, steppers[0].dtype, mix)
                logits = logits_of(self._description, stream, torch.tensor(ends[1:], device=ids.device) - 1)
                for stepper, part in zip(steppers, tokens, strict=True):
                    stepper.end_prompt(len(part))
            rows = self._rows(logits)
        yield rows

    @contextmanager
    def _using(self, steppers: Sequence[FusedSteps]) -> Iterator[None]:
        """Inside, the caches are those of these streams; what was computed is there at the end."""
        with available.on(self._device), self._caches.of(steppers):
            yield
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # callers time it

    def _rows(self, logits: Tensor) -> list[Row]:
        return [*map(self._as_logits, logits.to(getattr(torch, self._description.logits_dtype)).float())]

    def release(self) -> None:
        """Free the recorded step."""
        self._known, self._graphs, self._tables = (), None, {}

    def _replayed(self, steppers: Sequence[FusedSteps], ids: Tensor) -> Tensor | None:
        """The logits of a captured step of these streams; None if there is none."""
        known = [(ref(stepper), stepper.cache.revision) for stepper in steppers]
        if known != self._known:
            self._known, self._tables = known, {}
            self._graphs = GraphSteps(self._step, self._caches) if self._captured else None
        if self._graphs is None:
            return None
        return self._graphs.logits({"input_ids": ids, "position_ids": ids})

    def _step(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        steppers, count = self._caches.steppers, len(input_ids)
        caches = [stepper.cache for stepper in steppers]
        alike = len({tuple(spec.windows for spec in cache.specs) for cache in caches}) == 1 < count

        def mix(number: int, layer: Attention | Mixer, projected: Tensor) -> Tensor:
            out = projected.new_empty(len(projected), layer.out.columns)
            if alike and isinstance(layer, Attention):
                joint = steppers[0].attention.steps
                joint(number, layer, projected, out, count, beside=caches, tables=self._tables)
                return out
            for at, stepper in enumerate(steppers):
                stepper.attention.steps(number, layer, projected[at : at + 1], out[at : at + 1])
            return out

        stream = run(self._description, input_ids, steppers[0].dtype, mix)
        return SimpleNamespace(logits=logits_of(self._description, stream, None))


class _Caches:
    """The caches of several streams, as `GraphSteps` takes one.

    Attributes:
        steppers: of the caches, while their step is computed.
    """

    revision = 0
    engine_note = ""

    def __init__(self) -> None:
        self.steppers: Sequence[FusedSteps] = ()

    @contextmanager
    def of(self, steppers: Sequence[FusedSteps]) -> Iterator[None]:
        """Those of some steppers, inside the block."""
        self.steppers = steppers
        try:
            yield
        finally:
            self.steppers = ()  # so that ended streams are freed

    @property
    def steady(self) -> bool:
        """Whether the windows of all have their final sizes."""
        return all(stepper.cache.steady for stepper in self.steppers)

    @property
    def head_groups(self) -> list[HeadGroup]:
        """Of all caches."""
        return [group for stepper in self.steppers for group in stepper.cache.head_groups]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write to all caches inside the block."""
        with ExitStack() as stack:
            for stepper in self.steppers:
                stack.enter_context(stepper.cache.writing())
            yield

    def count_token(self) -> None:
        """A step has taken a token of each."""
        for stepper in self.steppers:
            stepper.cache.count_token()
