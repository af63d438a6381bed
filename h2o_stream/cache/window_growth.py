"""How large a window becomes for what is pinned in it: pins leave at least half as many slots as it was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from h2o_stream.base.memory import format_bytes, free_bytes
from h2o_stream.cache.protection import merged
from h2o_stream.config import DEFAULT_CHUNK, MIN_EVICTABLE, POLICIES, RESIDUAL, CacheConfig, CachePlan
from h2o_stream.errors import ConfigError, OutOfMemoryError

_FULL_BITS = 16
"""Bits of a number in keys and values that are not quantized, at least."""


@dataclass(frozen=True)
class WindowGrowth:
    """The windows that a configured one may grow to.

    Attributes:
        config: configuration with a window, not with ratios.
        context: largest distance the model was trained for, or None.
        numbers: keys and values of a token, in all heads that evict; 0 if that is unknown.
        device: see `sized`.
    """

    config: CacheConfig
    context: int | None
    numbers: int
    device: Any

    def plan(self, window: int = 0) -> CachePlan:
        """The plan with so many slots, at least those of the config."""
        if window <= self.config.window:
            return self.config.plan(self.context)
        return self.config.grown_plan(window, self.context)

    def window(self, pins: Sequence[range]) -> int:
        """The window that these pins need: that of the config, or more.

        Raises:
            ConfigError: the model's context, or the size of the cache, does not allow it.
            OutOfMemoryError: there is no memory for it.
        """
        config, initial = self.config, self.config.window
        sinks = POLICIES[config.policy].sinks if config.sinks is None else config.sinks
        pinned = sum(map(len, merged((range(sinks), *pins))))
        if pinned <= sinks:
            return initial
        window = min(max(initial, pinned + max(initial - initial // 2, self.min_movable)), max(self.largest, initial))
        self.check(pinned, window)
        more = (window - initial) * self.numbers * (config.kv_bits or _FULL_BITS) // 8
        if window > initial and more > (free := free_bytes(self.device)):
            raise OutOfMemoryError(
                f"{pinned} pinned tokens (system prompt, tools, sinks, pins) need a window of {window}, which takes "
                f"{format_bytes(more)} more, and {format_bytes(free)} of memory are free; pin less, or lower --kv-bits"
            )
        return window

    def check(self, pinned: int, window: int, whose: str = "") -> None:
        """Raise ConfigError if so many pinned tokens do not leave enough slots of a window, which cannot grow."""
        if window - pinned < self.min_movable:
            if self.config.max_window is not None:
                limit = "as large as --cache-size allows"
            elif window == self.largest:
                limit = f"as large as the {self.context} positions that the model was trained for allow"
            else:
                limit = "which cannot grow in this stream any more"
            raise ConfigError(
                f"{pinned} pinned tokens (system prompt, tools, sinks, pins) leave {max(window - pinned, 0)} of a "
                f"window {whose}of {window}, {limit}; at least {self.min_movable} must be left; pin less (a shorter "
                "system prompt, fewer tools)"
            )

    @cached_property
    def min_movable(self) -> int:
        """Slots that pins must leave, with those of tokens that a quantized cache keeps in full precision."""
        return max(MIN_EVICTABLE, RESIDUAL[self.plan().kv_bits])

    @cached_property
    def largest(self) -> int:
        """The largest window that the context, or the size of the cache, allows."""
        config = self.config
        if config.max_window is not None:
            return config.max_window
        if self.context is None or self.plan().positions == "absolute":
            return 2**31
        chunk = min(DEFAULT_CHUNK, self.context // 8) if config.chunk is None else config.chunk
        return self.context - max(chunk, 1)
