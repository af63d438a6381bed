"""The first layers of a model of the runtime, which project texts that stand alone to queries and keys."""

from __future__ import annotations

from dataclasses import replace

import numpy

from h2o_stream.cache.slot_cache import SlotCache
from h2o_stream.config import CacheConfig
from h2o_stream.errors import H2OStreamError
from h2o_stream.native import library
from h2o_stream.native.description import Description
from h2o_stream.native.native_model import NativeModel
from h2o_stream.native.stepper import Stepper
from h2o_stream.runtime.heads import NeverChanges, layer_rules
from h2o_stream.runtime.rotations import Floats

MAX_BYTES = 1 << 30
"""Most bytes of matrices that a model may have: with more, every text would take long."""

MAX_TOKENS = 256
"""Most tokens of a text; more are cut off."""

DISTANCE = 1024
"""Tokens by which queries are rotated: what they look for was said long ago."""


class FirstLayers:
    """The first `count` layers of a model, which all attend and nothing else; used by one thread at a time."""

    def __init__(self, description: Description, count: int) -> None:
        native, first = library.loaded(), replace(description, layers=description.layers[:count])
        assert native is not None, "the model is a native one"
        self._attention = [layer.attention for layer in first.layers if layer.attention]
        layers = layer_rules(first)
        self._rotations = [rules.table for rules in layers]
        plan = CacheConfig("recent", MAX_TOKENS, sinks=0, positions="rolling", chunk=0, budgets="equal")
        self._cache = SlotCache(plan, layers, None)
        self._stepper = Stepper(native, NativeModel(first), NeverChanges(), self._cache, dense_prompts=True)

    def project(self, tokens: list[int]) -> list[tuple[Floats, Floats]]:
        """Queries [n, Hq, D], rotated by `DISTANCE`, and keys [n, Hkv, D], not rotated, of each layer."""
        count = len(tokens := tokens[:MAX_TOKENS])
        shapes = [(x.query_heads, x.kv_heads, x.head_size) for x in self._attention]
        sizes = [count * heads * size for queries, keys, size in shapes for heads in (queries, keys)]
        projected = numpy.empty(sum(sizes), numpy.float32)
        try:
            self._cache.prepare(count)
            logits = self._stepper.prompt(numpy.array([tokens], numpy.int64), keep=1, projected=projected)
        finally:
            self._cache.reset()
        if logits is None:
            raise H2OStreamError("this text cannot be read by itself")
        parts = iter(numpy.split(projected, numpy.cumsum(sizes)[:-1]))
        layers = []
        for attention, table, (queries, keys, size) in zip(self._attention, self._rotations, shapes, strict=True):
            scaled = next(parts).reshape(count, queries, size) * numpy.float32(attention.scaling)
            rotated = _rotated(scaled, table.on_cpu(DISTANCE + 1)[DISTANCE]) if table else scaled
            layers.append((rotated, next(parts).reshape(count, keys, size)))
        return layers


def first_layers(description: Description, count: int | None) -> FirstLayers | None:
    """The first layers of a model, or all; None if it is too large, or some do something else than to attend."""
    attention = [layer.attention for layer in description.layers if layer.attention and not layer.mixer]
    alike = len({x.query_heads for x in attention}) == 1 and all(x.source is None for x in attention)
    whole = len(attention) == len(description.layers) and not description.versions and not description.layer_embeddings
    if not alike or not whole or description.nbytes > MAX_BYTES:
        return None
    return FirstLayers(description, count or len(description.layers))


def _rotated(queries: Floats, rotation: Floats) -> Floats:
    """Queries [n, Hq, D], rotated by a row of `Rotations`."""
    cosine, sine = numpy.split(rotation, 2)
    half, rotated = len(cosine), queries.copy()
    first, second = queries[..., :half], queries[..., half : 2 * half]
    rotated[..., :half] = first * cosine - second * sine
    rotated[..., half : 2 * half] = second * cosine + first * sine
    return rotated
