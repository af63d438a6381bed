"""The first layers of a model of the runtime, which project texts that stand alone to queries and keys."""

from __future__ import annotations

from dataclasses import replace

import numpy
from numpy.typing import NDArray

from h2o_stream.config import CacheConfig
from h2o_stream.errors import H2OStreamError
from h2o_stream.native import library
from h2o_stream.native.attention import Attention
from h2o_stream.native.description import Description, NativeModel
from h2o_stream.native.stepper import Stepper
from h2o_stream.runtime.cache import RuntimeCache, RuntimeLayer
from h2o_stream.runtime.heads import Unchanged, head_shapes
from h2o_stream.runtime.rotations import Rotations

Floats = NDArray[numpy.float32]

MOST_BYTES = 1 << 30
"""Of the matrices of a model: with more, every text would take long."""

MOST_TOKENS = 256
"""Of a text; more are cut off."""

DISTANCE = 1024
"""By which queries are rotated: what they look for was said long ago."""


class FirstLayers:
    """Layers that all attend and nothing else; used by one thread at a time.

    Args:
        description: of the whole model.
        count: of the layers.
    """

    def __init__(self, description: Description, count: int) -> None:
        native, first = library.loaded(), replace(description, layers=description.layers[:count])
        assert native is not None, "the model is a native one"
        self._attention = [layer.attention for layer in first.layers if layer.attention]
        layers = [
            RuntimeLayer(shape, Rotations(_frequencies(x)) if x.rope else None)
            for x, shape in zip(self._attention, head_shapes(first), strict=True)
        ]
        plan = CacheConfig("recent", MOST_TOKENS, sinks=0, positions="rolling", chunk=0, budgets="equal")
        self._cache = RuntimeCache(plan, layers, first.dtype, None, lambda: "")
        self._stepper = Stepper(native, NativeModel(first), Unchanged(), self._cache, dense_prompts=True)

    def project(self, tokens: list[int]) -> list[tuple[Floats, Floats]]:
        """Queries [n, Hq, D], rotated by `DISTANCE`, and keys [n, Hkv, D], not rotated, of each layer."""
        count = len(tokens := tokens[:MOST_TOKENS])
        shapes = [(x.query_heads, x.kv_heads, x.head_size) for x in self._attention]
        sizes = [count * heads * size for queries, keys, size in shapes for heads in (queries, keys)]
        projected = numpy.empty(sum(sizes), numpy.float32)
        try:
            self._cache.prepare(count)
            taken = self._stepper.prompt(numpy.array([tokens], numpy.int64), keep=1, projected=projected)
        finally:
            self._cache.reset()
        if taken is None:
            raise H2OStreamError("this text cannot be read by itself")
        parts = iter(numpy.split(projected, numpy.cumsum(sizes)[:-1]))
        found = []
        for attention, (queries, keys, size) in zip(self._attention, shapes, strict=True):
            rotated = _rotated(next(parts).reshape(count, queries, size), attention)
            found.append((rotated, next(parts).reshape(count, keys, size)))
        return found


def first_layers(description: Description, count: int | None) -> FirstLayers | None:
    """The first layers of a model, or all; None if it is too large, or some do something else than to attend."""
    attention = [layer.attention for layer in description.layers if layer.attention and not layer.mixer]
    alike = len({x.query_heads for x in attention}) == 1 and all(x.source is None for x in attention)
    whole = len(attention) == len(description.layers) and not description.versions and not description.layer_embeddings
    if not alike or not whole or description.nbytes > MOST_BYTES:
        return None
    return FirstLayers(description, count or len(description.layers))


def _rotated(queries: Floats, attention: Attention) -> Floats:
    """Queries [n, Hq, D], scaled for attention and rotated by `DISTANCE`."""
    rotated = queries * numpy.float32(attention.scaling)
    if attention.rope is None:
        return rotated
    angles = numpy.float32(DISTANCE) * _frequencies(attention)
    cosine, sine, half = numpy.cos(angles), numpy.sin(angles), len(angles)
    first, second = rotated[..., :half].copy(), rotated[..., half : 2 * half].copy()
    rotated[..., :half] = first * cosine - second * sine
    rotated[..., half : 2 * half] = second * cosine + first * sine
    return rotated


def _frequencies(attention: Attention) -> Floats:
    """[rotary_dims / 2], also where the description is of a transformers model."""
    assert attention.rope is not None
    return numpy.asarray(attention.rope.frequencies, numpy.float32)
