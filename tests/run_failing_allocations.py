"""Lets every allocation, or every n-th, of native steps and prompts fail in turn, and prints how many times one did.

Run by test_failed_allocations with failing_allocations.cpp preloaded. What fails raises OutOfMemoryError, and whatever
comes next gives the bits that it gives without failures.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import numpy

from h2o_stream.attachment.describe import describe
from h2o_stream.cache.windows import HeadWindow
from h2o_stream.config import CacheConfig
from h2o_stream.errors import OutOfMemoryError
from h2o_stream.native import batch, library, stepper
from h2o_stream.native.abi import MatrixKind, Sharing
from h2o_stream.native.batch import BatchStepper
from h2o_stream.native.pointers import Array
from h2o_stream.runtime.model import RuntimeModel
from tests.fixtures import make_llama
from tests.test_experts import TOKENS, described, with_arrays

every = 1
"""One of so many allocations fails."""

PRELOADED = ctypes.CDLL(None)
PRELOADED.fail_allocations.argtypes = [ctypes.c_long] * 2


def each_failure(make: Callable[[], Any], act: Callable[[Any], Array]) -> Iterator[tuple[Any, Array | None]]:
    """What was made and what `act` has returned, None if it ran out of memory, for each allocation that fails in it.

    Alone, and with all that follow.
    """
    for failing in (1, 2**30):
        for number in count(failing % every, every):
            made, result = make(), None
            PRELOADED.fail_allocations(number, failing)
            with suppress(OutOfMemoryError):
                result = act(made)
            if not PRELOADED.allow_allocations():
                break
            yield made, result


class Streams:
    """Streams of a model, each of another length, that are stepped together."""

    def __init__(self, model: RuntimeModel, config: CacheConfig, rows: int, sharing: Sharing = Sharing.TUNED) -> None:
        native = library.loaded()
        assert native is not None
        self._served = [model.serve(config) for _ in range(rows)]
        for number, served in enumerate(self._served):
            served.forward(TOKENS[: 30 + number])
        self._batch = BatchStepper(native, model.description)
        native.h2o_step_share(self._batch._step, sharing)

    def step(self, rows: int) -> Array:
        """Logits [rows, V] after a token of the first streams."""
        steppers = [served.stepper for served in self._served[:rows]]
        for number, one in enumerate(steppers):
            assert one.begin_step(numpy.array([7 + number]))
        return self._batch.step(steppers).copy()


def check_step(model: RuntimeModel, config: CacheConfig, sharing: Sharing) -> int:
    """The first step of all and, on the same threads, the first step of more streams."""
    failures = 0
    expected = Streams(model, config, 1, sharing).step(1)
    for streams, result in each_failure(lambda: Streams(model, config, 1, sharing), lambda made: made.step(1)):
        assert numpy.array_equal(streams.step(1) if result is None else result, expected)
        failures += 1

    def make() -> Streams:
        streams = Streams(model, config, 2, sharing)
        streams.step(1)
        return streams

    grown, streams = make().step(2), make()
    expected = numpy.concatenate([streams.step(1), streams.step(2)])
    for streams, result in each_failure(make, lambda made: made.step(2)):
        if result is not None:
            assert numpy.array_equal(result, grown)
        else:
            assert numpy.array_equal(numpy.concatenate([streams.step(1), streams.step(2)]), expected)
        failures += 1
    return failures


def check_undefined(make: Callable[[], Any], act: Callable[[Any], Array]) -> int:
    """What leaves its streams undefined if it fails, but nothing else."""
    failures, expected = 0, act(make())
    for _, result in each_failure(make, act):
        assert numpy.array_equal(act(make()) if result is None else result, expected)
        failures += 1
    return failures


def main(name: str, rule: str, what: str, stride: str) -> None:
    """Check something of a model and a cache."""
    global every
    every = int(stride)
    for module in (batch, stepper):
        module.num_threads = lambda: 3
    windows = [(HeadWindow((0,), 1.4), HeadWindow((1,), 0.6))] * 2
    description = {
        "dense": lambda: describe(make_llama(heads=2, groups=2, size=16)),
        "experts": lambda: described("softmax", MatrixKind.INT8, 32, 64),
    }[name]()
    config = {
        "h2o": CacheConfig(window=24),
        "absolute": CacheConfig("recent", window=24, positions="absolute"),
    }[rule]
    model = RuntimeModel(with_arrays(description), windows, "x", str, 128, 128, [None] * 2, None)
    failures = {
        "prompt": lambda: check_undefined(lambda: model.serve(config), lambda made: made.forward(TOKENS)),
        "batch": lambda: check_undefined(lambda: Streams(model, config, 6), lambda made: made.step(6)),
        "step": lambda: check_step(model, config, Sharing.BARRIERS),
        "assisted step": lambda: check_step(model, config, Sharing.ASSISTED),
    }[what]()
    print(failures)
    assert failures > 20 / every


if __name__ == "__main__":
    main(*sys.argv[1:])
