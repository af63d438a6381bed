"""Steps and prompts of a described model on a GPU, in place of its forward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from h2o_stream.cache.attention import LogitTransform
from h2o_stream.cache.group_rules import HeadShape
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.kernels import Kernels
from h2o_stream.config import PREFILL_STEP_MAX
from h2o_stream.gpu import available
from h2o_stream.gpu.graphs import GraphSteps
from h2o_stream.gpu.groups import limits_of, walks
from h2o_stream.gpu.journal import Journal
from h2o_stream.gpu.kernels import GpuKernels, NewTokens, Norms
from h2o_stream.gpu.layers import in_order, logits_of, run, takes_rows
from h2o_stream.gpu.lookahead import PASSES, GpuPasses
from h2o_stream.gpu.matrices import rows_of
from h2o_stream.native.attention import Attention
from h2o_stream.native.description import Description
from h2o_stream.native.lookahead import Passes
from h2o_stream.native.model_guard import ModelGuard

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
        others: the steps of several rows of a model that is only fused for one; None: its own forward.

    Attributes:
        dtype: of activations, keys and values.
        why_not: nothing, see `Stepper`.
        takes_prompts: several tokens or rows, too.
        prefill_step: tokens of a prompt that are worth a forward.
    """

    why_not = ""

    def __init__(
        self,
        description: Description,
        cache: H2OCache,
        kernels: Kernels,
        unchanged: ModelGuard,
        captured: bool,
        others: GraphSteps | None = None,
    ) -> None:
        assert isinstance(kernels, GpuKernels)
        self._description, self.cache, self._kernels, self._unchanged = description, cache, kernels, unchanged
        self.dtype, self._others = getattr(torch, description.dtype), others
        self.takes_prompts = takes_rows(description)
        self.prefill_step = BLOCK * LANES if self.takes_prompts else PREFILL_STEP_MAX
        device = description.embedding.weights.device
        ordered = [in_order(layer.attention) for layer in description.layers if layer.attention]
        self._attentions = [attention for attention, _ in ordered]
        self._orders = [None if order is None else order.to(device) for _, order in ordered]
        attentions = [layer.attention for layer in description.layers if layer.attention]
        self._sinks = [None if x.sink_logits is None else x.sink_logits.to(device) for x in attentions]
        self._shapes = [HeadShape(x.query_heads, x.kv_heads, x.head_size, x.value_size) for x in attentions]
        self._graphs = GraphSteps(self._step, cache) if captured else None
        made = {size: GraphSteps(self._step, cache, count=lambda: None) for size in PASSES} if captured else {}
        self._passes: dict[int, GraphSteps] = made
        self._journal: Journal | None = None
        self._journal_of = -1
        self._streams: list[torch.cuda.Stream] = []

    def use_float32(self) -> None:
        """Compute in float32, whatever the weights are in."""
        self.dtype = torch.float32

    def logits(self, kwargs: dict[str, Any]) -> Tensor | None:
        """See `attachment.forward.Steps`."""
        tokens: Tensor = kwargs["input_ids"]
        logits: Tensor | None = None
        if len(tokens) > 1 and not self.takes_prompts:
            return self._others.logits(kwargs) if self._others else None
        if tokens.shape[1] == 1 and self.cache.tokens.lengths:
            logits = self._graphs.logits(kwargs) if self._graphs and self._unchanged else None
            logits = self.run(tokens) if logits is None else logits
        else:
            logits = self.run_prompt(tokens, kwargs.get("logits_to_keep", 0))
        return None if logits is None else logits.to(getattr(torch, self._description.logits_dtype))

    @torch.no_grad()
    def run(self, tokens: Tensor) -> Tensor | None:
        """A token of each row, [B, 1] to [B, 1, V] float32; None, with nothing touched, where it has to be eager."""
        cache = self.cache
        cache.make_room()
        if not (self._unchanged and self._are_tokens(tokens) and self._can_step(len(tokens))):
            return None
        with cache.writing():
            logits: Tensor = self._step(tokens).logits
            cache.count_token()
        return logits

    @torch.no_grad()
    def run_prompt(self, tokens: Tensor, keep: int = 0) -> Tensor | None:
        """Several tokens of each row, [B, Q] to [B, keep or Q, V] float32; None likewise."""
        (rows, new), cache = tokens.shape, self.cache
        self._unchanged.invalidate()
        lengths = cache.tokens.lengths or (0,) * rows
        groups = cache.head_groups
        if (
            not self.takes_prompts
            or len(lengths) != rows
            or not all(map(walks, groups))
            or any(group.watch for group in groups)
        ):
            return None
        if not (self._unchanged and self._are_tokens(tokens)):
            return None
        for group in groups:
            if not group.is_initialized:
                group.device = tokens.device
        after = [length + new for length in lengths]
        cache.make_room_for_prompt(self._shapes, str(self.dtype).removeprefix("torch."), (*lengths, *after), rows)
        if not self._have_dtype():
            return None
        with cache.writing():
            logits = self._in_blocks(tokens, min(keep, new) or new)
            torch._foreach_add_([group.seen for group in groups], new)
            cache.count_prompt()
        return logits

    def _are_tokens(self, tokens: Tensor) -> bool:
        """Whether tokens can be looked up. What stands for something else than text is refused for the whole model."""
        return tokens.device == self._description.embedding.weights.device and not tokens.is_floating_point()

    def _can_step(self, rows: int) -> bool:
        lengths = self.cache.tokens.lengths
        whole = len(lengths) == rows and (rows == 1 or self.takes_prompts) and self._have_dtype()
        return whole and all(self._kernels.can_step(x, lengths) and not x.watch for x in self.cache.head_groups)

    def _have_dtype(self) -> bool:
        return all(group.is_initialized and group.dtype == self.dtype for group in self.cache.head_groups)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """[B Q, hidden]"""
        rows = rows_of(self._description.embedding, tokens.flatten(), self.dtype)
        scale = self._description.embedding_scale
        return rows if scale == 1 else rows * scale

    def _step(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        """A forward of a token of each row [B, 1], or of several of one stream [1, Q], which can be captured.

        Several are a pass: products of all at once, and attention and eviction of one after another.
        """
        rows, new = input_ids.shape

        def attend(number: int, _: Attention, projected: Tensor) -> Tensor:
            attention = self._attentions[number]
            heads, out = self._heads(number, projected, rows, new)
            query, key = attention.query_norm, attention.key_norm
            factor = attention.rope.scale if attention.rope else 1.0
            norms = Norms(query.weight, key.weight, query.epsilon, key.epsilon, factor)
            lengths = self.cache.tokens.lengths
            for group in self.cache.layers[number].head_groups:
                for token in range(new):
                    if token and self._journal:
                        self._journal.note(group, token)
                    self._kernels.step(
                        group, heads.one(token, group.heads), self._transform(number, attention), lengths, norms
                    )
            return out

        stream = run(self._description, self._embedded(input_ids), attend)
        return SimpleNamespace(logits=logits_of(self._description, stream).view(rows, new, -1))

    # passes

    def passes(self) -> Passes[Tensor] | None:
        """Those of this stream, of models that take several rows."""
        return GpuPasses(self) if self.takes_prompts else None

    def pass_size(self, tokens: int) -> int:
        """See `PassSteps`."""
        cache = self.cache
        fits = cache.steady and not cache.torn and len(cache.tokens.lengths) == 1
        if not (fits and self._unchanged and self._can_step(1)):
            return 0
        return next((size for size in PASSES if size <= tokens), 0)

    @torch.no_grad()
    def run_pass(self, ids: Sequence[int]) -> Tensor:
        """See `PassSteps`."""
        cache = self.cache
        if self._journal_of != cache.revision:
            self._journal, self._journal_of = Journal(list(cache.head_groups), max(PASSES) - 1), cache.revision
        tokens = torch.tensor([[*ids]], dtype=torch.int64, device=self._description.embedding.weights.device)
        with available.on(tokens.device):
            captured = self._passes.get(len(ids))
            kwargs = {"input_ids": tokens, "position_ids": tokens}
            logits = captured.logits(kwargs) if captured else None
            if logits is None:
                with cache.writing():
                    logits = self._step(tokens).logits
        return logits[0].to(getattr(torch, self._description.logits_dtype)).float()

    @torch.no_grad()
    def take_back(self, count: int, kept: int) -> None:
        """See `PassSteps`."""
        assert self._journal
        with available.on(self._description.embedding.weights.device), self.cache.writing():
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

        def attend(number: int, _: Attention, projected: Tensor) -> Tensor:
            attention = self._attentions[number]
            heads, out = self._heads(number, projected, rows, new)
            for x, norm in ((heads.query, attention.query_norm), (heads.key, attention.key_norm)):
                if norm.weight is not None:
                    x.copy_(functional.rms_norm(x.float(), x.shape[-1:], norm.weight, norm.epsilon))
            starts = [(length + offset, new) for length in self.cache.tokens.lengths or (0,) * rows]
            if before:
                torch.cuda.current_stream().wait_event(before[number])
            for group in self.cache.layers[number].head_groups:
                of_group, transform = heads._replace(heads=group.heads), self._transform(number, attention)
                factor, limits = attention.rope.scale if attention.rope else 1.0, limits_of(group, starts, new)
                self._kernels.prompt(group, of_group, transform, None, limits, offset, factor, LANES, lane)
            if done:
                done[number].record()
            return out

        stream = run(self._description, self._embedded(tokens), attend)
        if not keep:
            return None
        places = torch.arange(rows * new, device=tokens.device).view(rows, new)[:, -keep:]
        return logits_of(self._description, stream, places.flatten()).view(rows, keep, -1)

    def _heads(self, number: int, projected: Tensor, rows: int, new: int) -> tuple[NewTokens, Tensor]:
        """The heads of B Q tokens as views of what was projected, and [B Q, Hq Dv] for their outputs."""
        attention, order = self._attentions[number], self._orders[number]
        projected = projected if order is None else projected.index_select(1, order)
        total, at = projected.shape[1], attention.heads

        def heads(count: int, size: int, offset: int, stride: int) -> Tensor:
            return projected.as_strided((rows, count, new, size), (new * total, stride, total, 1), offset)

        query = heads(attention.query_heads, attention.head_size, at.query_offset, at.query_stride)
        key = heads(attention.kv_heads, attention.head_size, at.key_offset, at.key_stride)
        value = heads(attention.kv_heads, attention.value_size, at.value_offset, at.value_stride)
        out = torch.empty(rows * new, attention.out.columns, dtype=self.dtype, device=projected.device)
        return NewTokens(query, key, value, out.view(rows, new, attention.query_heads, -1).transpose(1, 2)), out

    def _transform(self, number: int, attention: Attention) -> LogitTransform:
        return LogitTransform(attention.scaling, attention.softcap or None, self._sinks[number])


def why_not(cache: H2OCache, description: Description) -> str:
    """Why the layers of a cache are not those of `layers`, or nothing."""
    if cache.plan.positions == "absolute":
        return "positions are absolute"
    if description.placeholders:
        return "some tokens stand for something else than text"
    groups: list[HeadGroup] = list(cache.head_groups)
    rotations = [(x.attention.rope is not None) for x in description.layers if x.attention]
    tables = [all(group.table is not None for group in layer.head_groups) for layer in cache.layers]
    if rotations != tables or any(group.plan.kv_bits < 16 for group in groups):
        return "the cache stores keys in another way"
    return ""
