"""Measures which heads of a model of the runtime retrieve; the counterpart of `attachment.retrieval_heads`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy
from numpy.typing import NDArray

from h2o_stream.base.progress import Progress, ProgressCallback
from h2o_stream.cache.group_rules import HeadShape
from h2o_stream.cache.layer_rules import LayerRules
from h2o_stream.cache.retrieval import num_rows, repeated_tokens, retrieval_windows
from h2o_stream.cache.rotations import Rotations
from h2o_stream.cache.slot_cache import SlotCache
from h2o_stream.cache.windows import HeadWindow
from h2o_stream.config import CacheConfig
from h2o_stream.errors import H2OStreamError
from h2o_stream.native import library
from h2o_stream.native.description import Description
from h2o_stream.native.matrix import require
from h2o_stream.native.native_model import NativeModel
from h2o_stream.native.stepper import Stepper
from h2o_stream.runtime.rotations import Floats


class NeverChanges:
    """Nobody else has the weights of a model of the runtime; see `native.stepper.Guard`."""

    def __bool__(self) -> bool:
        return True

    def invalidate(self) -> None:
        """There is nothing to look at."""


def layer_rules(description: Description) -> list[LayerRules]:
    """What a cache must know of each layer, but for its windows. Layers share tables of rotations."""
    tables, rules = dict[int, Rotations](), list[LayerRules]()
    for layer in description.layers:
        x, shape, table = layer.attention, None, None
        if x is not None:
            shape = HeadShape(x.query_heads, x.kv_heads, x.head_size, x.value_size)
        if x is not None and x.rope:
            frequencies = x.rope.frequencies  # which may be a tensor
            table = tables.setdefault(id(frequencies), Rotations(numpy.asarray(frequencies, numpy.float32)))
        states = layer.mixer.states if layer.mixer else {}
        rules.append(LayerRules(shape, table, shape is not None, state_shapes=states, dtype=description.dtype))
    return rules


def num_weights(description: Description) -> int:
    """Number of weights in matrices; packed ones count bytes."""
    matrices = (*description.matrices, description.embedding)
    return sum({id(matrix.weights): int(matrix.weights.size) for matrix in matrices}.values())


def measured_windows(
    description: Description, sliding: Sequence[int | None], context: int, progress: ProgressCallback
) -> list[tuple[HeadWindow, ...]]:
    """The KV heads of each layer grouped by window size; a layer that slides while others do not is one group.

    `sliding` are the windows of layers that slide while others do not; `context`, what the model was trained for.
    """
    total = len(description.layers)
    progress(Progress("measuring", 0, total))
    windows = iter(retrieval_windows(attention_to_copy(description, sliding, context)))
    progress(Progress("measuring", total, total))
    return [next(windows) if evicts else (HeadWindow(),) for evicts in _evicting(description, sliding)]


def _evicting(description: Description, sliding: Sequence[int | None]) -> list[bool]:
    """Whether each layer has heads with windows of their own; arguments as of `measured_windows`."""
    layers = zip(description.layers, sliding, strict=True)
    return [layer.attention is not None and window is None for layer, window in layers]


def attention_to_copy(description: Description, sliding: Sequence[int | None], context: int) -> Floats:
    """Fraction of attention on a token's previous occurrence and the one after it: [layers that evict, Hkv] float32."""
    tokens = repeated_tokens(description.embedding.rows, num_rows(num_weights(description)), context)
    measured = [_measure(description, sliding, row[None]) for row in tokens]
    mean: Floats = numpy.mean(measured, 0, dtype=numpy.float32)
    counts = [rules.shape.kv_heads if rules.shape else 0 for rules in layer_rules(description)]
    by_layer = numpy.split(mean, numpy.cumsum(counts)[:-1])
    chosen = [heads for heads, evicts in zip(by_layer, _evicting(description, sliding), strict=True) if evicts]
    require(len({*map(len, chosen)}) == 1, "its layers have different numbers of KV heads, which are not measured")
    return numpy.stack(chosen)


def _measure(description: Description, sliding: Sequence[int | None], tokens: NDArray[numpy.int64]) -> Floats:
    """[KV heads of all layers] for tokens [1, n], through a cache that holds all of them."""
    native, count = library.loaded(), tokens.shape[1]
    assert native is not None, "the weights are packed"
    every = zip(layer_rules(description), sliding, strict=True)
    layers = [replace(rules, hidden_from=seen) for rules, seen in every]
    plan = CacheConfig("recent", count, sinks=0, span=0, positions="absolute", chunk=0)
    cache = SlotCache(plan, layers, count)
    copied = numpy.zeros(sum(rules.shape.kv_heads for rules in layers if rules.shape), numpy.float32)
    cache.prepare(count)
    stepper = Stepper(native, NativeModel(description), NeverChanges(), cache, dense_prompts=True)
    if stepper.prompt(tokens, keep=1, copied=copied) is None:
        raise H2OStreamError("the heads of this model cannot be measured; use --engine eager")
    return copied
