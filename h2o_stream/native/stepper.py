"""Decode steps and prompts in the native library, in place of a model's forward."""

from __future__ import annotations

import ctypes
from ctypes import CDLL
from typing import Any

import numpy
import torch
from torch import Tensor

from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.cache.tolerance import error_of, tolerance_of
from h2o_stream.errors import H2OStreamError, OutOfMemoryError
from h2o_stream.native.abi import SLOTS, STREAM, pointer
from h2o_stream.native.description import NativeModel
from h2o_stream.native.model_guard import ModelGuard
from h2o_stream.native.prompts import PromptForward
from h2o_stream.native.slots import BoundLayer, why_not

MAX_ROWS = 64
"""Rows of a batch beyond which torch's products of matrices are faster."""

_BYTES_PER_THREAD = 2**20
"""Weights that a thread should have to read in a step, to be worth waiting for."""


class Stepper:
    """Steps of one model through the slots of one cache; see `h2o_stream.attachment.forward.Stepper`.

    Args:
        native: the library.
        model: the description, as structures.
        unchanged: whether the description still holds.
        cache: of the attached model.

    Attributes:
        why_not: why the cache as it is now cannot be served, or nothing.
    """

    def __init__(self, native: CDLL, model: NativeModel, unchanged: ModelGuard, cache: H2OCache) -> None:
        self.cache, self.model, self._unchanged = cache, model, unchanged
        self._native = native
        self._layers: list[BoundLayer] = []
        self._revision, self._columns, self._steady, self.why_not = -1, -1, False, ""
        if cache.plan.positions != "absolute":
            for layer in model.layers:
                layer.frequencies = None  # keys are rotated when they are attended to
        self._most_threads = max(1, model.description.nbytes // _BYTES_PER_THREAD)
        self._step = native.h2o_step_open(ctypes.addressof(model.struct))
        self._prompts = PromptForward(native, model, cache)
        self.takes_prompts = not self._prompts.why_not

    def __del__(self) -> None:
        if getattr(self, "_step", None):
            self._native.h2o_step_close(self._step)

    def logits(self, kwargs: dict[str, Any]) -> Tensor | None:
        """See `h2o_stream.attachment.forward.Stepper`."""
        tokens = kwargs["input_ids"]
        if tokens.shape[1] == 1 and self.cache.tokens.lengths:
            logits = self.run(tokens)
        else:
            logits = self.run_prompt(tokens, kwargs.get("logits_to_keep", 0))
        return None if logits is None else logits.to(self.model.description.logits_dtype)

    def run(self, tokens: Tensor, trace: Tensor | None = None) -> Tensor | None:
        """Take a token of each row through the model, and count it.

        Args:
            tokens: [B, 1] int64 or int32.
            trace: [layers + 1, B, hidden] float32: gets the residual stream before every layer and after the last.

        Returns:
            [B, 1, V] float32; None where it has to be done eagerly, and nothing was touched.
        """
        rows, cache = len(tokens), self.cache
        if rows > MAX_ROWS or len(cache.tokens.lengths) != rows or tokens.device.type != "cpu":
            return None
        if tokens.dtype not in (torch.int64, torch.int32):
            return None
        cache.make_room()
        if self._revision != cache.revision:
            self.why_not = self._bind()
        if cache.tokens.columns != self._columns:  # a prompt came between
            self._unchanged.invalidate()
        if self.why_not or not self._unchanged:
            return None
        if not (self._steady and cache.steady):
            for layer in self._layers:
                for number, group in enumerate(layer.head_groups):
                    layer.slots["evictions"][:, number] = group.num_evictions
            self._steady = cache.steady
        ids = tokens[:, 0].numpy()
        if ids.min() < 0 or ids.max() >= self.model.struct.vocab_size:
            return None  # the model's own forward refuses it
        self._streams["token"] = ids
        vocabulary, model = self.model.struct.vocab_size, self.model
        logits = torch.empty(rows, 1, vocabulary, dtype=torch.float32, device="cpu")
        traced = (len(model.layers) + 1) * rows * model.struct.hidden_size
        cache.begin_token()
        failed = self._native.h2o_step(
            self._step,
            self._streams.ctypes.data,
            rows,
            pointer(logits, torch.float32, rows * vocabulary),
            pointer(trace, torch.float32, traced),
            min(torch.get_num_threads(), self._most_threads),
        )
        if failed:
            raise OutOfMemoryError(f"out of memory for a step of {rows} rows")
        cache.count_token()
        self._columns = cache.tokens.columns
        return logits

    def run_prompt(self, tokens: Tensor, keep: int = 0) -> Tensor | None:
        """Take several tokens of each row through the model, and count them.

        Args:
            tokens: [B, Q] int64 or int32, none of them padding.
            keep: logits of how many of the last tokens are wanted; 0 for all.

        Returns:
            [B, keep or Q, V] float32; None where it has to be done eagerly, and nothing was touched.
        """
        rows, new = tokens.shape
        if not self.takes_prompts or not new or len(self.cache.tokens.lengths or tokens) != rows:
            return None
        if tokens.device.type != "cpu" or tokens.dtype not in (torch.int64, torch.int32):
            return None
        self._unchanged.invalidate()
        if not self._unchanged or tokens.min() < 0 or tokens.max() >= self.model.struct.vocab_size:
            return None
        return self._prompts.run(tokens.long(), min(keep, new) or new)

    def _bind(self) -> str:
        """Bind the addresses of all slots; why the library does not support them, or nothing."""
        self._revision = self.cache.revision
        bound: list[BoundLayer] = []
        first = 0
        for cached, layer in zip(self.cache.layers, self.model.layers, strict=True):
            groups = cached.head_groups
            if reason := next(filter(None, map(why_not, groups)), ""):
                return reason
            bound.append(BoundLayer(groups, layer.attention))
            layer.first_group, layer.group_count = first, len(groups)
            first += len(groups)
        # The slots of a stream are contiguous; those of a layer are a view of them.
        self._slots = numpy.empty((len(bound[0].slots), first), dtype=SLOTS)
        for bound_layer, layer in zip(bound, self.model.layers, strict=True):
            whole = self._slots[:, layer.first_group : layer.first_group + layer.group_count]
            whole[:] = bound_layer.slots
            bound_layer.slots = whole
        rows = len(self._slots)
        self._streams = numpy.zeros(rows, dtype=STREAM)
        self._streams["slots"] = self._slots.ctypes.data + self._slots.strides[0] * numpy.arange(rows)
        self._layers, self._steady = bound, False
        return ""


class CheckedStepper:
    """Does every step eagerly, too, and raises where they differ."""

    takes_prompts = False

    def __init__(self, stepper: Stepper, model: Any) -> None:
        self._stepper, self._model, self._forward = stepper, model, model.forward

    def logits(self, kwargs: dict[str, Any]) -> Tensor | None:
        """See `Stepper.logits`.

        Raises:
            H2OStreamError: naming the first layer after which the residual streams differ.
        """
        cache, tokens = self._stepper.cache, kwargs["input_ids"]
        if not cache.tokens.lengths:
            return None
        model = self._stepper.model
        number, before = cache.stream_number, cache.state_dict()
        eager = self._forward(**kwargs, output_hidden_states=True)
        cache.load_state_dict(before)
        cache.stream_number = number  # it is the same stream
        shape = len(model.layers) + 1, len(tokens), model.struct.hidden_size
        trace = torch.empty(shape, dtype=torch.float32, device="cpu")
        logits = self._stepper.run(tokens, trace)
        if logits is None:
            return None
        tolerance = tolerance_of(self._model)
        for number, (ours, theirs) in enumerate(zip(trace[:-1], eager.hidden_states, strict=False)):
            if not error_of(ours, theirs[:, -1]) < tolerance:
                where = f"layer {number - 1}" if number else "the embedding"
                raise H2OStreamError(
                    f"after {where} the native step is off by {error_of(ours, theirs[:, -1]):.1e} of the rms, "
                    f"at most {tolerance:.0e} is rounding; use --engine eager"
                )
        if not error_of(logits, eager.logits) < tolerance:
            raise H2OStreamError(
                f"logits of the native step are off by {error_of(logits, eager.logits):.1e} of their rms, at most "
                f"{tolerance:.0e} is rounding; use --engine eager"
            )
        return logits.to(model.description.logits_dtype)
