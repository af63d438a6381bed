"""Decode steps of several caches of one model at once: every matrix is read once for all of their streams."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import CDLL
from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream.errors import H2OStreamError, OutOfMemoryError
from h2o_stream.native.abi import STREAM, AttentionLayer, pointer
from h2o_stream.native.description import Description, NativeModel
from h2o_stream.native.stepper import MAX_ROWS, PromptPlan, Stepper, raise_failure
from h2o_stream.native.threads import num_threads


class BatchStepper:
    """Steps streams of different caches, whose rules may differ only in windows and in what they protect.

    Args:
        native: the library.
        description: of the model that all of them serve.
    """

    def __init__(self, native: CDLL, description: Description) -> None:
        self._native, self._model = native, NativeModel(description)
        self._step = native.h2o_step_open(ctypes.addressof(self._model.struct))
        self._filled: tuple[tuple[int, int], ...] = ()
        self._logits = numpy.empty((0, self._model.struct.vocab_size), numpy.float32)

    def __del__(self) -> None:
        if getattr(self, "_step", None):
            self._native.h2o_step_close(self._step)

    def step(self, steppers: Sequence[Stepper], tokens: Sequence[int]) -> NDArray[numpy.float32]:
        """Take a token of each stream through the model, and count it.

        Args:
            steppers: of the caches, each with one row; all of the same `rules`.
            tokens: [B], one of each.

        Returns:
            [B, V] float32 logits, valid until the next step.

        Raises:
            H2OStreamError: a stream cannot be stepped; nothing was touched.
            OutOfMemoryError: there is none for so many streams.
        """
        ids = numpy.array(tokens, numpy.int64)
        for number, stepper in enumerate(steppers):
            if not stepper.begin_step(ids[number : number + 1]):
                raise H2OStreamError(f"this token cannot be fed: {stepper.why_not or 'the model has no such token'}")
        if len(self._logits) < len(ids):
            self._logits = numpy.empty((len(ids), self._logits.shape[1]), numpy.float32)
        self._fill_layers(steppers)
        for first in range(0, len(ids), MAX_ROWS):
            self._run(steppers[first : first + MAX_ROWS], self._logits[first : first + MAX_ROWS])
        return self._logits[: len(ids)]

    def prompt(
        self, steppers: Sequence[Stepper], tokens: Sequence[NDArray[numpy.int64]], plans: Sequence[PromptPlan]
    ) -> NDArray[numpy.float32]:
        """Take several tokens of each stream through the model, and count them.

        Args:
            steppers: of the caches, each with one row; all of the same `rules`.
            tokens: [Q] int64 of each.
            plans: what `Stepper.begin_prompt` has returned for them; all with the same chunk.

        Returns:
            [B, V] float32 logits after the last token of each.

        Raises:
            H2OStreamError: there is no memory, or no room in the slots. The caches are undefined.
        """
        lengths, ids = numpy.array([len(part) for part in tokens], numpy.int64), numpy.concatenate(tokens)
        limits = numpy.zeros((len(plans), plans[0].limits.shape[1], max(x.limits.shape[2] for x in plans)), numpy.int64)
        for row, plan in zip(limits, plans, strict=True):
            row[:, : plan.limits.shape[2]] = plan.limits[0]
        logits = numpy.empty((len(tokens), self._logits.shape[1]), numpy.float32)
        self._fill_layers(steppers)
        streams = self._begin(steppers)
        failed = self._native.h2o_forward(
            ctypes.addressof(self._model.struct),
            streams.ctypes.data,
            len(streams),
            pointer(lengths, "int64", len(streams)),
            pointer(ids, "int64", int(lengths.sum())),
            int(lengths.max()),
            plans[0].chunk,
            pointer(limits, "int64", limits.size),
            1,
            pointer(logits, "float32", logits.size),
            None,
            num_threads(),
        )
        raise_failure(failed)
        for stepper in steppers:
            stepper.end_prompt()
            stepper.cache.torn = False
        return logits

    def _begin(self, steppers: Sequence[Stepper]) -> NDArray[Any]:
        for stepper in steppers:
            stepper.cache.begin_token()
        return numpy.concatenate([stepper.streams for stepper in steppers], dtype=STREAM)

    def _run(self, steppers: Sequence[Stepper], logits: NDArray[numpy.float32]) -> None:
        streams = self._begin(steppers)
        failed = self._native.h2o_step(
            self._step,
            streams.ctypes.data,
            len(streams),
            pointer(logits, "float32", len(streams) * logits.shape[1]),
            None,
            num_threads(),
        )
        if failed:
            raise OutOfMemoryError(f"out of memory for a step of {len(streams)} streams")
        for stepper in steppers:
            stepper.end_step()
            stepper.cache.torn = False

    def _fill_layers(self, steppers: Sequence[Stepper]) -> None:
        """Take over rules and addresses that are the same for all, with the longest table of rotations."""
        filled = tuple((id(stepper), stepper.revision) for stepper in steppers)
        if filled == self._filled:
            return
        self._filled = filled
        for number, layer in enumerate(self._model.layers):
            bound = max((stepper.model.layers[number] for stepper in steppers), key=lambda x: x.attention.rope_rows)
            layer.attention, layer.frequencies = bound.attention, bound.frequencies
            layer.first_group, layer.group_count = bound.first_group, bound.group_count


def rules(stepper: Stepper) -> bytes:
    """What streams must have in common to be stepped together; the stepper's cache was stepped or prompted before."""
    copies = []
    for layer in stepper.model.layers:
        attention = AttentionLayer.from_buffer_copy(layer.attention)
        attention.rope, attention.rope_rows, attention.sink_logits = None, 0, None
        copies.append(bytes(attention) + bytes([layer.group_count]))
    return b"".join(copies)
