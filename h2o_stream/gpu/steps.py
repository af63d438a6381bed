"""Steps and prompts of a described model on a GPU, in place of its forward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from h2o_stream.cache.group_rules import HeadShape
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.cache.kernels import Kernels
from h2o_stream.gpu import available
from h2o_stream.gpu.graphs import GraphSteps
from h2o_stream.gpu.groups import walks
from h2o_stream.gpu.journal import Journal
from h2o_stream.gpu.kernels import GpuKernels
from h2o_stream.gpu.layers import logits_of, run
from h2o_stream.gpu.lookahead import PASSES, GpuPasses
from h2o_stream.gpu.stream_attention import StreamAttention
from h2o_stream.native.attention import Attention
from h2o_stream.native.description import Description
from h2o_stream.native.lookahead import Passes
from h2o_stream.native.mixers import Mixer
from h2o_stream.native.stepper import Guard, PromptPlan

BLOCK, LANES = 2048, 4
"""Tokens of a prompt that are multiplied at once, and blocks that are on their way at the same time: one is in an
earlier layer than the one before it, so that the products of one fill the processors that attention leaves."""


class FusedSteps:
    """Runs tokens through a model by `layers`; see `attachment.forward.Steps`.

    Args:
        description: of a model that `layers.why_not` has no objection to.
        cache: its slots are written; positions are not absolute.
        unchanged: whether the description still holds.
        captured: whether single tokens are captured as a CUDA graph.

    Attributes:
        dtype: of activations, keys and values.
        why_not: nothing, see `Stepper`.
        takes_prompts, prefill_step: several tokens, too, and so many are worth a forward.
        ids: [1, Q] tokens that `begin_step` or `begin_prompt` has prepared for a `FusedBatch`.
    """

    why_not, takes_prompts, prefill_step = "", True, BLOCK * LANES

    def __init__(
        self, description: Description, cache: H2OCache, kernels: Kernels, unchanged: Guard, captured: bool
    ) -> None:
        assert isinstance(kernels, GpuKernels)
        self.description, self.cache, self._kernels, self._unchanged = description, cache, kernels, unchanged
        self.dtype = getattr(torch, description.dtype)
        self.attention = StreamAttention(description, cache, kernels)
        self._shapes = [spec.shape or HeadShape(0, 0, 0, 0) for spec in cache.specs]
        self._captured = captured
        self._streams: list[torch.cuda.Stream] = []
        self.release()

    def release(self) -> None:
        """Free what steps and passes have recorded."""
        graphs, sizes = partial(GraphSteps, self._step, self.cache), PASSES if self._captured else ()
        self._graphs = graphs() if self._captured else None
        self._passes = {size: graphs(count=lambda: None) for size in sizes}
        self._journal: Journal | None = None
        self._journal_of = self._states_of = -1

    def use_float32(self) -> None:
        """Compute in float32, whatever the weights are in."""
        self.dtype = torch.float32

    def logits(self, kwargs: dict[str, Any]) -> Tensor | None:
        """See `attachment.forward.Steps`."""
        tokens: Tensor = kwargs["input_ids"]
        logits: Tensor | None = None
        if tokens.shape[1] == 1 and self.cache.tokens.lengths:
            logits = self._graphs.logits(kwargs) if self._graphs and self._unchanged else None
            logits = self.run(tokens) if logits is None else logits
        else:
            logits = self.run_prompt(tokens, kwargs.get("logits_to_keep", 0))
        return None if logits is None else logits.to(getattr(torch, self.description.logits_dtype))

    @torch.no_grad()
    def run(self, tokens: Tensor) -> Tensor | None:
        """A token of each row, [B, 1] to [B, 1, V] float32; None, with nothing touched, where it has to be eager."""
        cache = self.cache
        cache.make_room()
        if not (self._are_tokens(tokens) and self._can_step(len(tokens))):
            return None
        with cache.writing():
            logits: Tensor = self._step(tokens).logits
            cache.count_token()
        return logits

    @torch.no_grad()
    def run_prompt(self, tokens: Tensor, keep: int = 0) -> Tensor | None:
        """Several tokens of each row, [B, Q] to [B, keep or Q, V] float32; None likewise."""
        new = tokens.shape[1]
        if not (self._are_tokens(tokens) and self._can_read(*tokens.shape)):
            return None
        with self.cache.writing():
            logits = self._in_blocks(tokens, min(keep, new) or new)
            self.end_prompt(new)
        return logits

    def begin_step(self, ids: NDArray[numpy.int64]) -> bool:
        """Make room for a token [1] in a `FusedBatch`; whether it can be stepped."""
        self.cache.take_back()
        self.cache.make_room()
        self.ids = ids[None]
        return self._are_known(ids) and self._can_step(1)

    def begin_prompt(self, ids: NDArray[numpy.int64]) -> PromptPlan | None:
        """Make room for several tokens [1, Q]; None if they cannot be taken."""
        self.cache.take_back()
        self.ids = ids
        if not (self._are_known(ids) and self._can_read(*ids.shape)):
            return None
        return PromptPlan(self.cache.plan.chunk, numpy.empty((1, 0, 0), numpy.int64))

    def end_prompt(self, new: int) -> None:
        """Count so many tokens of each row, which a prompt has taken."""
        torch._foreach_add_([group.seen for group in self.cache.head_groups], new)
        self.cache.count_prompt()

    def _are_known(self, ids: NDArray[numpy.int64]) -> bool:
        return bool(ids.min() >= 0 and ids.max() < self.description.embedding.rows)

    def _are_tokens(self, tokens: Tensor) -> bool:
        """Whether tokens can be looked up. What stands for something else than text is refused for the whole model."""
        return tokens.device == self.description.embedding.weights.device and not tokens.is_floating_point()

    def _can_read(self, rows: int, new: int) -> bool:
        """Make room for so many tokens of each row, if they can be taken."""
        self._unchanged.invalidate()
        cache, groups = self.cache, self.cache.head_groups
        lengths = cache.tokens.lengths or (0,) * rows
        if len(lengths) != rows or not self._unchanged:
            return False
        if not all(map(walks, groups)) or any(group.watch for group in groups):
            return False
        for group in groups:
            if not group.is_initialized:
                group.device = self.description.embedding.weights.device
        after = [length + new for length in lengths]
        cache.make_room_for_prompt(self._shapes, str(self.dtype).removeprefix("torch."), (*lengths, *after), rows)
        self.attention.begin(rows)
        return self._have_dtype()

    def _can_step(self, rows: int) -> bool:
        lengths = self.cache.tokens.lengths
        whole = len(lengths) == rows and self._have_dtype() and self._unchanged
        return bool(whole) and all(self._kernels.can_step(x, lengths) and not x.watch for x in self.cache.head_groups)

    def _have_dtype(self) -> bool:
        """Whether slots have the dtype of steps; states, which may have been loaded, get theirs."""
        if self._states_of != self.cache.revision:
            self.cache.use_own_dtypes()
            self._states_of = self.cache.revision
        return all(group.is_initialized and group.dtype == self.dtype for group in self.cache.head_groups)

    def _step(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        """A forward of a token of each row [B, 1], or of several of one stream [1, Q], which can be captured.

        Several are a pass: products of all at once, and attention and eviction of one after another.
        """
        rows, new = input_ids.shape

        def mix(number: int, part: Attention | Mixer, projected: Tensor) -> Tensor:
            return self.attention.steps(number, part, projected, rows=rows, journal=self._journal)

        stream = run(self.description, input_ids, self.dtype, mix)
        return SimpleNamespace(logits=logits_of(self.description, stream).view(rows, new, -1))

    # passes

    def passes(self) -> Passes[Tensor]:
        """Those of this stream."""
        return GpuPasses(self)

    def pass_size(self, tokens: int) -> int:
        """See `PassSteps`."""
        cache = self.cache
        fits = cache.steady and not cache.torn and len(cache.tokens.lengths) == 1
        if not (fits and self._can_step(1)):
            return 0
        return next((size for size in PASSES if size <= tokens), 0)

    @torch.no_grad()
    def run_pass(self, ids: Sequence[int]) -> Tensor:
        """See `PassSteps`."""
        cache = self.cache
        if self._journal_of != cache.revision:
            self._journal, self._journal_of = self.attention.new_journal(max(PASSES), self.dtype), cache.revision
        tokens = torch.tensor([[*ids]], dtype=torch.int64, device=self.description.embedding.weights.device)
        with available.on(tokens.device):
            captured = self._passes.get(len(ids))
            kwargs = {"input_ids": tokens, "position_ids": tokens}
            logits = captured.logits(kwargs) if captured else None
            if logits is None:
                with cache.writing():
                    logits = self._step(tokens).logits
        return logits[0].to(getattr(torch, self.description.logits_dtype)).float()

    @torch.no_grad()
    def take_back(self, count: int, kept: int) -> None:
        """See `PassSteps`."""
        assert self._journal
        with available.on(self.description.embedding.weights.device), self.cache.writing():
            self._journal.take_back(count, kept)

    def _in_blocks(self, tokens: Tensor, keep: int) -> Tensor:
        """[B, keep, V]: a layer takes the blocks of a prompt in order, and each block the layers in order."""
        rows, new = tokens.shape
        size = new if keep > BLOCK else max(BLOCK // rows // 64, 1) * 64
        if new % size and new % size < keep:
            size = new
        parts, main = tokens.split(size, 1), None
        if tokens.is_cuda and len(parts) > 1:
            main = torch.cuda.current_stream(tokens.device)
            while len(self._streams) < LANES:
                self._streams.append(torch.cuda.Stream(tokens.device))
            for stream in self._streams:
                stream.wait_stream(main)
        before: list[torch.cuda.Event] = []
        logits = None
        for number, part in enumerate(parts):
            lane = number % LANES
            done = [torch.cuda.Event() for _ in self._shapes] if main else []
            with torch.cuda.stream(self._streams[lane]) if main else nullcontext():
                wanted = keep if number == len(parts) - 1 else 0
                logits = self._block(part, wanted, number * size, lane, before, done)
            before = done
        assert logits is not None
        if main:
            for stream in self._streams:
                main.wait_stream(stream)
            logits.record_stream(main)
        return logits

    def _block(
        self, tokens: Tensor, keep: int, offset: int, lane: int, before: list[Any], done: list[Any]
    ) -> Tensor | None:
        """Logits [B, keep, V], if any are wanted, of tokens [B, Q] that come `offset` after the counted ones.

        A layer waits for the event that is before it, and records its own.
        """
        rows, new = tokens.shape

        def mix(number: int, part: Attention | Mixer, projected: Tensor) -> Tensor:
            event = before[number] if before else None
            out = self.attention.prompt(number, part, projected, None, rows, offset, LANES, lane, event)
            if done:
                done[number].record()
            return out

        stream = run(self.description, tokens, self.dtype, mix)
        if not keep:
            return None
        places = torch.arange(rows * new, device=tokens.device).view(rows, new)[:, -keep:]
        return logits_of(self.description, stream, places.flatten()).view(rows, keep, -1)


def why_not(cache: H2OCache, description: Description) -> str:
    """Why the layers of a cache are not those of `layers`, or nothing."""
    if cache.plan.positions == "absolute":
        return "positions are absolute"
    if description.placeholders:
        return "some tokens stand for something else than text"
    rotations = [(x.attention.rope is not None) for x in description.layers if x.attention]
    attending = [layer.head_groups for layer in cache.layers if layer.head_groups]
    tables = [all(group.table is not None for group in groups) for groups in attending]
    if rotations != tables:
        return "the cache stores keys in another way"
    return ""
