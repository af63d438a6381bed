"""Whole decode steps in the native library: takes the place of a model's forward where it gives the same.

`make_stepper` describes a model, proves the description by comparing logits with the model's own forward, and gives a
`Stepper`, or the reason why there is none. All that is native or eager is decided here.
"""

from __future__ import annotations

import ctypes
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import torch
from torch import Tensor

from h2o_stream.cache.window import H2OCache
from h2o_stream.native import library
from h2o_stream.native.abi import STREAM
from h2o_stream.native.describe import describe
from h2o_stream.native.description import Description, NativeModel, NotDescribed
from h2o_stream.native.slots import BoundLayer, groups_of, unserved

PROMPT, STEPS = 6, 3
"""Tokens of the proof: read at once, and then one by one."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.06}
"""Root mean square of the differences of logits, as a share of that of the logits."""

PACKED_TOLERANCE = 0.1
"""The same with weights in a few bits: the step rounds vectors to 8 bits, long prompts are not rounded."""

_proved: WeakKeyDictionary[Any, set[tuple[Any, ...]]] = WeakKeyDictionary()


class Stepper:
    """Steps of one model through the slots of one cache.

    Args:
        native: the loaded library.
        model: the description, as structures.
        cache: an attached model's cache.
    """

    def __init__(self, native: ctypes.CDLL, model: NativeModel, cache: H2OCache) -> None:
        self._native, self._model, self._cache = native, model, cache
        self._layers: list[BoundLayer] = []
        self._bound_to: tuple[int, int] | None = None
        self._step = 0
        for layer, described in zip(model.layers, model.description.layers, strict=True):
            if cache.plan.positions != "absolute" and described.attention.rope is not None:
                layer.frequencies = None
        native.h2o_step_open.restype = ctypes.c_void_p
        native.h2o_step_close.argtypes = [ctypes.c_void_p]

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Take a token of each row.

        Args:
            tokens: [B, 1] int64.

        Returns:
            [B, 1, V] float32; None where this step has to go the eager way, and nothing was done.
        """
        layers = self._cache.layers
        if not layers[0].is_initialized or tokens.shape[0] != len(layers[0].lengths):
            return None
        if self._bound_to != (id(layers[0]), self._cache.layout) and not self._bind():
            return None
        for layer in self._layers:
            layer.count_evictions()
        self._streams["token"] = tokens[:, 0].numpy()
        logits = torch.empty(len(tokens), 1, self._model.struct.vocabulary)
        self._native.h2o_step(
            ctypes.c_void_p(self._step),
            ctypes.c_void_p(self._streams.ctypes.data),
            ctypes.c_int64(len(tokens)),
            ctypes.c_void_p(logits.data_ptr()),
            ctypes.c_int64(torch.get_num_threads()),
        )
        self._cache.count_step()
        return logits

    def close(self) -> None:
        """Release what the library holds."""
        if self._step:
            self._native.h2o_step_close(self._step)
            self._step = 0

    def _bind(self) -> bool:
        """Take down the addresses of all slots anew; whether the library can serve them."""
        bound, first = [], 0
        for cached, layer in zip(self._cache.layers, self._model.layers, strict=True):
            groups = groups_of(cached, layer.attention.kv_heads)
            if any(unserved(group.slots) for group in groups):
                return False
            own = BoundLayer(groups, layer.attention)
            layer.first_group, layer.group_count = first, len(groups)
            first += len(groups)
            bound.append(own)
        self._layers = bound
        rows = len(bound[0].slots)
        self._slots = numpy.concatenate([layer.slots for layer in bound], axis=1)
        for layer, struct in zip(bound, self._model.layers, strict=True):
            layer.slots = self._slots[:, struct.first_group : struct.first_group + struct.group_count]
        self._streams = numpy.zeros(rows, dtype=STREAM)
        self._streams["slots"] = self._slots.ctypes.data + self._slots.strides[0] * numpy.arange(rows)
        self.close()
        self._step = self._native.h2o_step_open(ctypes.byref(self._model.struct))
        self._bound_to = (id(self._cache.layers[0]), self._cache.layout)
        return True
