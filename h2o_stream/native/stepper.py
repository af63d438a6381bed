"""Decode steps and prompts in the native library, in place of a model's forward. Imports no torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import CDLL
from dataclasses import dataclass
from itertools import chain, count
from math import prod
from typing import Any, Protocol

import numpy
from numpy.typing import NDArray

from h2o_stream.cache.group_rules import HeadShape
from h2o_stream.cache.slot_cache import SlotCache
from h2o_stream.cache.slots import Slots
from h2o_stream.errors import H2OStreamError, OutOfMemoryError
from h2o_stream.native import library
from h2o_stream.native.abi import SLOTS, STREAM, TOO_FEW_SLOTS
from h2o_stream.native.description import DENSE
from h2o_stream.native.matrix import Matrix
from h2o_stream.native.native_model import NativeModel
from h2o_stream.native.pointers import Array, pointer
from h2o_stream.native.slots import BoundLayer, why_not
from h2o_stream.native.threads import num_threads

MAX_ROWS = 64
"""Rows of a batch beyond which torch's products of matrices are faster."""

_REFUSED = 3
"""What the library returns if it cannot address what it is given, see `src/check.h`."""

_BYTES_PER_THREAD = 2**20
"""Weights that a thread should have to read in a step, to be worth waiting for."""

_BINDINGS = count()
"""Numbers of what was bound, whichever stepper it was."""


class Guard(Protocol):
    """Says whether what was described still holds."""

    def __bool__(self) -> bool:
        """Whether it does."""

    def invalidate(self) -> None:
        """Look more closely the next time."""


@dataclass(frozen=True)
class PromptPlan:
    """How a prompt is taken: tokens between evictions, and [B, groups, chunks] tokens that may be held after each."""

    chunk: int
    limits: NDArray[numpy.int64]


def raise_failure(code: int, what: str = "so many tokens at once; lower --chunk") -> None:
    """Raise H2OStreamError for what a step or prompt of the library has returned, as OutOfMemoryError for `what`."""
    if code == TOO_FEW_SLOTS:
        raise H2OStreamError("there are too few slots for these tokens; use --engine eager")
    if code == _REFUSED:
        raise H2OStreamError("numbers of the cache do not fit each other; native code does not use it")
    if code:
        raise OutOfMemoryError(f"out of memory for {what}")


def open_step(native: CDLL, model: NativeModel) -> int:
    """What `h2o_step` runs in, which must be closed; raises H2OStreamError if there is no memory or nothing fits."""
    step: int | None = native.h2o_step_open(ctypes.addressof(model.struct))
    if step is None and (part := library.refusal(native)):
        raise H2OStreamError(f"{part} does not fit the rest of the model; native code does not use it")
    if step is None:
        raise OutOfMemoryError("out of memory for decode steps")
    return step


class Stepper:
    """Steps and prompts of one model through the slots of one cache.

    Args:
        unchanged: whether the description still holds.
        dense_prompts: whether prompts are taken although weights are dense.

    Attributes:
        takes_prompts: whether `prompt` serves the model.
        native, handle: the library, and what `h2o_step` runs in.
        why_not: why the cache as it is now cannot be served, or nothing.
        revision: that of the cache for which the addresses of its slots are bound.
        binding: number of these addresses, which those of no other stepper and no other time have.
        streams: [B] `abi.STREAM`, the rows of the next step.
    """

    def __init__(
        self,
        native: CDLL,
        model: NativeModel,
        unchanged: Guard,
        cache: SlotCache,
        dense_prompts: bool = False,
    ) -> None:
        self.cache, self.model, self._unchanged = cache, model, unchanged
        self.dtype = model.description.dtype
        self.native = native
        self._layers: list[BoundLayer] = []
        self.revision, self._columns, self._steady, self.why_not = -1, -1, False, ""
        self.binding, self._bound_tokens = -1, 0
        mixers = enumerate(layer.mixer for layer in model.description.layers)
        self._state_shapes = {number: mixer.states for number, mixer in mixers if mixer}
        attention = [layer.attention for layer in model.layers]
        self._shapes = [HeadShape(x.query_heads, x.kv_heads, x.head_size, x.value_size) for x in attention]
        if cache.plan.positions != "absolute":
            for layer, described in zip(model.layers, model.description.layers, strict=True):
                layer.frequencies = None  # keys are rotated when they are attended to
                temperature = described.attention.temperature if described.attention else None
                if temperature and temperature.of_positions:
                    layer.temperature = 0.0
        self._most_threads = max(1, model.description.nbytes // _BYTES_PER_THREAD)
        self.handle = open_step(native, model)
        self.takes_prompts = dense_prompts or _is_mostly_packed(model.description.matrices)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.native.h2o_step_close(self.handle)

    def reopen(self) -> None:
        """Free the buffers of steps."""
        used, self.handle = self.handle, open_step(self.native, self.model)
        self.native.h2o_step_close(used)

    def step(
        self, ids: NDArray[numpy.int64], trace: Array | None = None, out: NDArray[numpy.float32] | None = None
    ) -> NDArray[numpy.float32] | None:
        """Take a token of each row through the model, and count it.

        Args:
            ids: [B] int64.
            trace: [layers + 1, B, hidden] float32: gets the residual stream before every layer and after the last.
            out: [B, 1, V] float32: gets the logits.

        Returns:
            [B, 1, V] float32; None where it has to be done eagerly, and nothing was touched.

        Raises:
            OutOfMemoryError: there is none for so many rows.
        """
        rows, model = len(ids), self.model
        if rows > MAX_ROWS or not self.begin_step(ids):
            return None
        vocabulary = model.struct.vocab_size
        logits = numpy.empty((rows, 1, vocabulary), numpy.float32) if out is None else out
        traced = (len(model.layers) + 1) * rows * model.struct.hidden_size
        with self.cache.writing():
            failed = self.native.h2o_step(
                self.handle,
                self.streams.ctypes.data,
                rows,
                pointer(logits, "float32", rows * vocabulary),
                pointer(trace, "float32", traced),
                self.threads,
            )
            raise_failure(failed, f"a step of {rows} rows")
            self.end_step()
        return logits

    @property
    def threads(self) -> int:
        """Threads of a step."""
        return min(num_threads(), self._most_threads)

    def begin_step(self, ids: NDArray[numpy.int64]) -> bool:
        """Fill `streams` for a token of each row [B]; whether they can be stepped."""
        cache = self.cache
        cache.take_back()
        if len(cache.tokens.lengths) != len(ids):
            return False
        cache.make_room()
        if cache.tokens.columns != self._columns:  # something else has used the model
            self._unchanged.invalidate()
        if not (self._bind(cache.plan.chunk) and self._unchanged and self._are_tokens(ids)):
            return False
        if not (self._steady and cache.steady):
            evictions = [[x.num_evictions(length) for x in self._schedules] for length in cache.tokens.lengths]
            self._slots["evictions"] = evictions
            self._steady = cache.steady
        self.streams["token"] = ids
        return True

    def begin_pass(self, ids: NDArray[numpy.int64]) -> NDArray[Any] | None:
        """The rows of `h2o_pass` for tokens [n] of a stream, which follow one another; None if they cannot be taken."""
        if not (self.begin_step(ids[:1]) and self._are_tokens(ids)):
            return None
        self._pass_slots = numpy.repeat(self._slots, len(ids), axis=0)
        if not self._steady:
            length = self.cache.tokens.lengths[0]
            later = range(length, length + len(ids))
            self._pass_slots["evictions"] = [[x.num_evictions(seen) for x in self._schedules] for seen in later]
        rows = numpy.repeat(self.streams, len(ids))
        rows["slots"] = self._pass_slots.ctypes.data + self._pass_slots.strides[0] * numpy.arange(len(ids))
        rows["token"] = ids
        return rows

    def end_step(self) -> None:
        """Count a token of each row, which a step has taken."""
        self.cache.count_token()
        self._columns = self.cache.tokens.columns

    def prompt(
        self,
        ids: NDArray[numpy.int64],
        keep: int = 0,
        copied: NDArray[numpy.float32] | None = None,
        projected: NDArray[numpy.float32] | None = None,
    ) -> NDArray[numpy.float32] | None:
        """Take several tokens of each row through the model, and count them.

        Args:
            ids: [B, Q] int64, none of them padding.
            keep: logits of how many of the last tokens are wanted; 0 for all.
            copied: the KV heads of all layers, float32: gets their attention to the copy in a row [1, Q] of tokens that
                come twice, with ``absolute`` positions.
            projected: float32 [...]: gets the queries [B, Q, Hq, D] of each layer that attends and then its keys
                [B, Q, Hkv, D], one layer after another. They are rotated with ``absolute`` positions only.

        Returns:
            [B, keep or Q, V] float32; None where it has to be done eagerly, and no token was.

        Raises:
            OutOfMemoryError: there is none for so many tokens.
        """
        (rows, new), cache, model = ids.shape, self.cache, self.model
        plan = self.begin_prompt(ids)
        if plan is None:
            return None
        keep, vocabulary = min(keep, new) or new, model.struct.vocab_size
        ids = numpy.ascontiguousarray(ids)
        logits = numpy.empty((rows, keep, vocabulary), numpy.float32)
        attention = [layer.attention for layer in model.layers]
        projected_size = sum((x.query_heads + x.kv_heads) * x.head_size for x in attention)
        with cache.writing():
            failed = self.native.h2o_forward(
                ctypes.addressof(model.struct),
                self.streams.ctypes.data,
                rows,
                pointer(ids, "int64", rows * new),
                new,
                plan.chunk,
                pointer(plan.limits, "int64", plan.limits.size),
                keep,
                pointer(logits, "float32", rows * keep * vocabulary),
                pointer(copied, "float32", sum(x.kv_heads for x in attention)),
                pointer(projected, "float32", rows * new * projected_size),
                num_threads(),
            )
            raise_failure(failed)
            self.end_prompt()
        return logits

    def begin_prompt(self, ids: NDArray[numpy.int64]) -> PromptPlan | None:
        """Make room for several tokens of each row [B, Q] and fill `streams`; None if they cannot be taken."""
        (rows, new), cache = ids.shape, self.cache
        cache.take_back()
        lengths = cache.tokens.lengths or (0,) * rows
        if not self.takes_prompts or not new or len(lengths) != rows:
            return None
        self._unchanged.invalidate()
        if not (self._unchanged and self._are_tokens(ids)):
            return None
        chunk = cache.plan.chunk or new
        ends = [min(start + chunk, new) for start in range(0, new, chunk)]
        after = [[length + end for end in ends] for length in lengths]
        cache.make_room_for_prompt(self._shapes, self.dtype, (*lengths, *chain.from_iterable(after)), rows)
        return PromptPlan(chunk, self._limits(after)) if self._bind(chunk) else None

    def end_prompt(self) -> None:
        """Count the tokens of each row, which a prompt has taken."""
        self.cache.count_prompt()
        self._columns = self.cache.tokens.columns

    def _are_tokens(self, ids: NDArray[numpy.int64]) -> bool:
        """Whether all are in the vocabulary and stand for text; the model's own forward takes or refuses others."""
        placeholders = self.model.description.placeholders
        if placeholders and bool(numpy.isin(ids, placeholders).any()):
            return False
        return bool(ids.min() >= 0 and ids.max() < self.model.struct.vocab_size)

    def _limits(self, lengths: list[list[int]]) -> NDArray[numpy.int64]:
        """[B, groups, chunks] int64: how many tokens each head group may hold at these lengths [B, chunks]."""
        schedules = [group.schedule for group in self.cache.head_groups]
        held = [[[*map(schedule.held, row)] for schedule in schedules] for row in lengths]
        return numpy.array(held, numpy.int64)

    def _bind(self, new_tokens: int) -> bool:
        """Bind the addresses of all slots if they changed, for so many tokens at once; whether they are supported."""
        changed = self.revision != self.cache.revision or new_tokens > self._bound_tokens
        if changed:
            self.revision, self._bound_tokens = self.cache.revision, new_tokens
            self.why_not = next(filter(None, map(why_not, self.cache.head_groups)), "")
            if not self.why_not:
                self._bind_slots()
        if self._state_shapes and not self.why_not and (changed or self.cache.tokens.columns != self._columns):
            self._bind_states()
        return not self.why_not

    def _bind_slots(self) -> None:
        bound, first = list[BoundLayer](), 0
        for number, layer in enumerate(self.model.layers):
            groups: Sequence[Slots] = self.cache.groups_of(number)
            layer.first_group, layer.group_count = first, len(groups)
            first += len(groups)
            if groups:
                bound.append(BoundLayer(groups, layer.attention, self._bound_tokens))
        # The slots of a stream are contiguous; those of a layer are a view of them.
        self._slots = numpy.empty((len(bound[0].slots), first), dtype=SLOTS)
        first = 0
        for bound_layer in bound:
            whole = self._slots[:, first : first + len(bound_layer.head_groups)]
            whole[:] = bound_layer.slots
            bound_layer.slots = whole
            first += len(bound_layer.head_groups)
        self._schedules = [group.schedule for layer in bound for group in layer.head_groups]
        rows = len(self._slots)
        self.streams = numpy.zeros(rows, dtype=STREAM)
        self.streams["slots"] = self._slots.ctypes.data + self._slots.strides[0] * numpy.arange(rows)
        self._layers, self._steady, self.binding = bound, False, next(_BINDINGS)

    def _bind_states(self) -> None:
        """Bind the addresses of all recurrent states, which whoever else uses the model may replace."""
        rows = len(self.streams)
        self._states = [
            state
            for number, shapes in self._state_shapes.items()
            for state in self.cache.recurrent_states(number, shapes, rows)
        ]
        sizes = [prod(shape) for shapes in self._state_shapes.values() for shape in shapes.values()]
        first = [pointer(state, "float32", rows * size) for state, size in zip(self._states, sizes, strict=True)]
        bytes_per_row = 4 * numpy.array(sizes, numpy.int64)
        self._addresses = numpy.array(first, numpy.int64) + bytes_per_row * numpy.arange(rows)[:, None]
        self.streams["states"] = self._addresses.ctypes.data + self._addresses.strides[0] * numpy.arange(rows)


def _is_mostly_packed(matrices: Sequence[Matrix]) -> bool:
    """Whether less than half of the weights are dense, as far as torch is faster with them."""
    dense = sum(x.weights.nbytes for x in matrices if x.kind in DENSE)
    return bool(2 * dense < sum(x.weights.nbytes for x in matrices))
