"""The window for which the cache of one stream takes a given number of bytes, or few beside those of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from h2o_stream.base.memory import format_bytes, free_bytes
from h2o_stream.cache.group_rules import HeadShape
from h2o_stream.config import (
    AUTO_MEMORY_SHARE,
    AUTO_QUERIES,
    AUTO_STEP_SHARE,
    AUTO_WINDOWS,
    DEFAULT_CHUNK,
    DEFAULT_WINDOW,
    EXACT_SINKS,
    MIN_EVICTABLE,
    RESIDUAL,
    SIZED_KV_BITS,
    CacheConfig,
)
from h2o_stream.errors import ConfigError

_SMALLEST = max(EXACT_SINKS.values()) + max(RESIDUAL.values()) + MIN_EVICTABLE
"""Slots of the smallest window that is tried."""

_TRIALS = 8
"""Windows that are tried at most: bytes are almost proportional to slots, so three or four are enough."""


def provisional(config: CacheConfig) -> CacheConfig:
    """The config with the smallest window in place of the size, to verify a model with."""
    smallest = max(_SMALLEST, (config.heavy or 0) + (config.sinks or 0) + 1)
    return replace(config, cache_size=None, kv_bits=config.kv_bits or SIZED_KV_BITS, window=smallest)


def sized(
    config: CacheConfig,
    max_distance: int | None,
    allocated_bytes: Callable[[CacheConfig], int],
    step_bytes: Callable[[], int],
    shapes: Iterable[HeadShape | None],
    device: Any = None,
) -> CacheConfig:
    """The config with the window that its `cache_size`, or `auto_window`, asks for; else unchanged.

    Args:
        config: configuration of a cache that evicts.
        max_distance: largest distance the model was trained for, or None.
        allocated_bytes: what one stream takes at most with a config that has a window.
        step_bytes: bytes of weights that a step reads.
        shapes: heads of the layers; None for a layer without attention, or unknown ones.
        device: torch's device whose memory the cache takes; None for the host's.
    """
    if config.cache_size is not None:
        return config_for_size(config, max_distance, allocated_bytes)
    if not config.auto_window or config.window != DEFAULT_WINDOW:  # which has been chosen before
        return config
    queries = max((x.query_heads / x.kv_heads for x in shapes if x), default=1)
    step_share = AUTO_STEP_SHARE * min(1, AUTO_QUERIES / queries)
    max_bytes = min(step_bytes() * step_share, free_bytes(device) * AUTO_MEMORY_SHARE / config.auto_window)
    largest = _largest_window(config, max_distance)
    for window in AUTO_WINDOWS[1:]:  # from the smallest, so that small models start without counting the large ones
        larger = replace(config, window=window)
        if window > largest or allocated_bytes(larger) > max_bytes:
            break
        config = larger
    return config


def _largest_window(config: CacheConfig, max_distance: int | None) -> int:
    chunk = DEFAULT_CHUNK if config.chunk is None else config.chunk
    return 2**31 if max_distance is None else max_distance - (chunk or 1)


def config_for_size(
    config: CacheConfig, max_distance: int | None, allocated_bytes: Callable[[CacheConfig], int]
) -> CacheConfig:
    """The config with the largest window of which the cache takes at most `config.cache_size` bytes.

    Counted are the tensors of one stream: keys, values and all bookkeeping. Where the model's context (`max_distance`)
    allows less, the window is what it allows. Pins do not let it grow.

    Raises:
        ConfigError: the smallest window takes more.
    """
    size = config.cache_size
    assert size is not None
    unsized = provisional(config)
    smallest = unsized.window
    largest = _largest_window(config, max_distance)

    def with_window(window: int) -> CacheConfig:
        fitting = max(min(window, largest), 1)
        return replace(unsized, window=fitting, max_window=fitting)

    def bytes_of(window: int) -> int:
        return allocated_bytes(with_window(window))

    base = bytes_of(smallest)
    if base > size:
        raise ConfigError(
            f"cache_size is {format_bytes(size)}, but a window of {smallest} takes {format_bytes(base)}; "
            "raise --cache-size"
        )
    best, (before, bytes_before), window = smallest, (smallest, base), 2 * smallest
    for _ in range(_TRIALS):
        window = max(min(window, largest), smallest)
        total = bytes_of(window)
        if total <= size:
            best = max(best, window)
        if window == before or total == bytes_before:
            break
        per_slot = (total - bytes_before) / (window - before)
        before, bytes_before, window = window, total, window + math.floor((size - total) / per_slot)
    while best < largest and bytes_of(best + 1) <= size:
        best += 1
    return with_window(best)
