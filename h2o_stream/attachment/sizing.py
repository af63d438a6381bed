"""How many bytes the cache of one stream takes."""

from __future__ import annotations

from typing import Any

from h2o_stream.cache.h2o_cache import H2OCache


def allocated_bytes(cache: H2OCache, model_config: Any) -> int:
    """Bytes that one stream takes at most, of an empty cache, by allocating without data.

    Heads whose windows grow take what the others have given up, so what all take at first is the most.
    """
    text = model_config.get_text_config()
    total = 0
    for layer, spec in zip(cache.layers, cache.specs, strict=True):
        total += spec.state_bytes
        if not spec.attends:
            continue
        assert spec.key is not None
        heads, size = spec.key.shape
        for group in layer.head_groups:
            key = spec.key.new_empty(1, heads if group.heads is None else len(group.heads), 1, size)
            value = key.new_empty(*key.shape[:-1], getattr(text, "v_head_dim", None) or size)
            group.queries_per_key = text.num_attention_heads // text.num_key_value_heads
            group.allocate(key, value, group.schedule.common + group.spare)
            total += group.nbytes
    return total
