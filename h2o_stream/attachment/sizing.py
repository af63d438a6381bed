"""How many bytes the cache of one stream takes."""

from __future__ import annotations

import torch

from h2o_stream.cache.h2o_cache import H2OCache


def allocated_bytes(cache: H2OCache) -> int:
    """Bytes that one stream takes at most, of an empty cache, by allocating without data.

    Heads whose windows grow take what the others have given up, so what all take at first is the most.
    """
    total = 0
    for layer, spec in zip(cache.layers, cache.specs, strict=True):
        total += spec.state_bytes
        if not (shape := spec.shape):
            continue
        for group in layer.head_groups:
            heads = shape.kv_heads if group.heads is None else len(group.heads)
            sizes = shape.key_size, shape.value_size
            key, value = (torch.empty(1, heads, 1, size, dtype=spec.dtype, device="meta") for size in sizes)
            group.queries_per_key = shape.query_heads // shape.kv_heads
            group.allocate(key, value, group.schedule.common + group.spare)
            total += group.nbytes
    return total
