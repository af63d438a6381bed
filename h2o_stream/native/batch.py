"""Decode steps and prompts of several caches of one model: every matrix is read once for all of their streams."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import CDLL, c_void_p
from itertools import chain
from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream.native.abi import STREAM, AttentionLayer
from h2o_stream.native.description import Description
from h2o_stream.native.native_model import NativeModel
from h2o_stream.native.pointers import pointer
from h2o_stream.native.stepper import MAX_ROWS, PromptPlan, Stepper, open_step, raise_failure
from h2o_stream.native.threads import num_threads


class BatchStepper:
    """Steps streams of several caches of one model, whose rules differ only in windows and in what they protect."""

    def __init__(self, native: CDLL, description: Description) -> None:
        self._native, self._model = native, NativeModel(description)
        self._step = open_step(native, self._model)
        self._filled: tuple[int, ...] = ()
        self._logits = numpy.empty((0, self._model.struct.vocab_size), numpy.float32)

    def __del__(self) -> None:
        if getattr(self, "_step", None):
            self._native.h2o_step_close(self._step)

    def step(self, steppers: Sequence[Stepper]) -> NDArray[numpy.float32]:
        """Take a token of each stream through the model, and count it.

        Args:
            steppers: those of the caches, each with one row, begun by `Stepper.begin_step`; all of the same `rules`.

        Returns:
            [B, V] float32 logits, valid until the next step.

        Raises:
            OutOfMemoryError: there is none for so many streams.
        """
        logits, filled = self._room_for(len(steppers)), tuple(stepper.binding for stepper in steppers)
        if filled != self._filled:
            _fill_layers(self._model, steppers)
            self._filled = filled
        for first in range(0, len(steppers), MAX_ROWS):
            self._run(steppers[first : first + MAX_ROWS], logits[first : first + MAX_ROWS])
        return logits

    def read(
        self, steppers: Sequence[Stepper], tokens: Sequence[Sequence[int]], plans: Sequence[PromptPlan]
    ) -> Iterator[NDArray[numpy.float32] | None]:
        """Take several tokens of each stream through the model, a layer at a time, and count them at the end.

        Steps of other streams may come between.

        Args:
            steppers: those of the caches, each with one row; all of the same `rules`.
            tokens: the next ones of each.
            plans: what `Stepper.begin_prompt` has returned for each; all with the same chunk.

        Yields:
            None after each layer, and [B, V] float32 at last: the logits after the last token of each stream.

        Raises:
            OutOfMemoryError: there is none for so many tokens. The caches are undefined.
        """
        model, lengths = self._model.copied(), numpy.array([len(part) for part in tokens], numpy.int64)
        _fill_layers(model, steppers)
        logits = numpy.empty((len(steppers), model.struct.vocab_size), numpy.float32)
        out = pointer(logits, "float32", logits.size)
        with _writing(steppers) as streams, self._begun(model, streams, lengths, tokens, plans) as prompt:
            for number in range(len(model.layers)):
                if number:
                    yield None
                raise_failure(self._native.h2o_prompt_layer(prompt, number, out))
            for stepper in steppers:
                stepper.end_prompt()
        yield logits

    @contextmanager
    def _begun(
        self, model: NativeModel, streams: NDArray[Any], lengths: NDArray[numpy.int64],
        tokens: Sequence[Sequence[int]], plans: Sequence[PromptPlan],
    ) -> Iterator[c_void_p]:  # fmt: skip
        """The handle of a prompt whose embeddings are read."""
        ids, prompt = numpy.fromiter(chain.from_iterable(tokens), numpy.int64), c_void_p()
        groups, chunks = plans[0].limits.shape[1], max(plan.limits.shape[2] for plan in plans)
        limits = numpy.zeros((len(plans), groups, chunks), numpy.int64)
        for row, plan in zip(limits, plans, strict=True):
            row[:, : plan.limits.shape[2]] = plan.limits[0]
        failed = self._native.h2o_prompt_open(
            ctypes.addressof(model.struct),
            streams.ctypes.data,
            len(streams),
            pointer(lengths, "int64", len(streams)),
            pointer(ids, "int64", int(lengths.sum())),
            int(lengths.max()),
            plans[0].chunk,
            pointer(limits, "int64", limits.size),
            num_threads(),
            ctypes.addressof(prompt),
        )
        raise_failure(failed)
        try:
            yield prompt
        finally:
            self._native.h2o_prompt_close(prompt)

    def release(self) -> None:
        """Free the logits of the last step, if nobody else holds them."""
        self._logits = self._logits[:0].copy()

    def _room_for(self, rows: int) -> NDArray[numpy.float32]:
        if len(self._logits) < rows:
            self._logits = numpy.empty((rows, self._logits.shape[1]), numpy.float32)
        return self._logits[:rows]

    def _run(self, steppers: Sequence[Stepper], logits: NDArray[numpy.float32]) -> None:
        with _writing(steppers) as streams:
            failed = self._native.h2o_step(
                self._step,
                streams.ctypes.data,
                len(streams),
                pointer(logits, "float32", len(streams) * logits.shape[1]),
                None,
                num_threads(),
            )
            raise_failure(failed, f"a step of {len(streams)} streams")
            for stepper in steppers:
                stepper.end_step()


def _fill_layers(model: NativeModel, steppers: Sequence[Stepper]) -> None:
    """Take over rules and addresses that are the same for all, with the longest table of rotations."""
    for number, bound in enumerate(zip(*(stepper.model.layers for stepper in steppers), strict=True)):
        model.layers[number] = max(bound, key=lambda layer: layer.attention.rope_rows)


@contextmanager
def _writing(steppers: Sequence[Stepper]) -> Iterator[NDArray[Any]]:
    """Write to the caches inside the block. Gives the rows of all of them."""
    with ExitStack() as stack:
        for stepper in steppers:
            stack.enter_context(stepper.cache.writing())
        yield numpy.concatenate([stepper.streams for stepper in steppers], dtype=STREAM)


def rules(stepper: Stepper) -> bytes:
    """What streams must have in common to be stepped together; the stepper's cache was stepped or prompted before."""
    copies = []
    for layer in stepper.model.layers:
        attention = AttentionLayer.from_buffer_copy(layer.attention)
        attention.rope = attention.rope_codes = attention.sink_logits = None
        attention.rope_rows = 0
        copies.append(bytes(attention) + bytes([layer.group_count]))
    return b"".join(copies)
