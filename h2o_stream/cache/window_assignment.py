"""How the slots of a cache are assigned: pinned and transient tokens, and how many tokens a group of heads may hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy

from h2o_stream.cache.layer_rules import LayerRules
from h2o_stream.cache.protection import Protection, merged
from h2o_stream.cache.slots import Slots
from h2o_stream.cache.windows import Schedule, schedules, windows
from h2o_stream.config import MIN_EVICTABLE, CachePlan
from h2o_stream.errors import H2OStreamError


class WindowAssignment:
    """Pins, transient tokens and windows of the layers that follow the plan.

    Args:
        plan: the window of a head in the mean, and what of it is protected.
        max_distance: largest distance the model was trained for, or None.

    Attributes:
        pins: ranges of token indices that are never evicted, without the sinks.
        transient: ranges of token indices that are evicted first.
        sizes: tokens that each group of heads holds in the end, in all processes.
        added: how many of these every group was given after tokens had been evicted.
        evicted: tokens that each group had evicted when it was given the last of them.
    """

    def __init__(
        self,
        plan: CachePlan,
        specs: Iterable[LayerRules],
        max_distance: int | None,
        pins: tuple[range, ...] = (),
        transient: tuple[range, ...] = (),
    ) -> None:
        self._plan, self._max_distance, self.pins, self.transient = plan, max_distance, pins, transient
        evicting = [spec for spec in specs if spec.evicts]
        self._windows = [window for spec in evicting for window in spec.windows]
        self._local = [window is not None for spec in evicting for window in spec.local_windows]
        self._schedules: Sequence[Schedule] = ()
        self.sizes: tuple[int, ...] = ()
        self.added, self.evicted = 0, (0,) * len(self._windows)

    @property
    def weights(self) -> tuple[int, ...]:
        """Weight of each group in means over heads."""
        return tuple(window.weight for window in self._windows)

    @property
    def protected(self) -> tuple[range, ...]:
        """Ranges of token indices that are never evicted, sinks and pins."""
        return merged((range(self._plan.sinks), *self.pins))

    def follow(self, plan: CachePlan) -> None:
        """Assign windows by another plan of an empty stream, or of one that has evicted nothing."""
        self._plan, self.added, self.evicted = plan, 0, (0,) * len(self.evicted)

    def grow(self, groups: Sequence[Slots], plan: CachePlan, seen: int) -> None:
        """Give every head as many slots more as the window of the plan has grown by, in a stream of `seen` tokens."""
        more, self.evicted = plan.window - self._plan.window, tuple(seen - x.held(seen) for x in self._schedules)
        self._plan, self.added = plan, self.added + more
        self.set_sizes(groups, [size + more for size in self.sizes])

    def update(self, groups: Sequence[Slots], fixed: bool) -> None:
        """Give each head its window unless that is `fixed`, and split what pins leave of it into heavy and recent."""
        plan, pinned = self._plan, sum(map(len, self.protected))
        if not fixed:
            sizes = windows(self._windows, plan.window, pinned, self._min_movable, self._max_window)
            self.set_sizes(groups, sizes)
        for group in groups:
            movable = group.schedule.window - pinned
            recent = movable - movable * plan.heavy // (plan.heavy + plan.recent)
            group.protection = Protection(plan.sinks, self.pins, max(recent, self._min_recent), self.transient)

    def set_sizes(self, groups: Sequence[Slots], sizes: Sequence[int]) -> None:
        """Give the heads their windows, and spans within the distances that the model knows."""
        plan, self.sizes = self._plan, tuple(sizes)
        before = tuple(size - self.added for size in sizes)
        self._schedules = schedules(before, self.weights, plan.window - self.added)
        if self.added:
            grown = zip(self._schedules, self.evicted, strict=True)
            self._schedules = [schedule.grown(self.added, evicted) for schedule, evicted in grown]
        local = [schedule for schedule, is_local in zip(self._schedules, self._local, strict=True) if is_local]
        for group, schedule in zip(groups, local, strict=True):
            group.set_schedule(schedule)
            if self._max_distance is not None and plan.positions == "gap":
                group.span = min(plan.span, self._max_distance - schedule.window - (plan.chunk or 1))

    @property
    def _max_window(self) -> int | None:
        """Largest window: half the distances that the model knows are left for the gaps between kept tokens."""
        if self._max_distance is None:
            return None
        return max(self._plan.window, (self._max_distance - (self._plan.chunk or 1)) // 2)

    @property
    def _min_movable(self) -> int:
        """Tokens that every head needs beside the pinned ones."""
        return max(MIN_EVICTABLE, self._min_recent + 1)

    @property
    def _min_recent(self) -> int:
        """Newest tokens that pins must leave: one, or as many as a quantized cache keeps in full precision."""
        return max(self._plan.residual - 1, 1)


def check_not_evicted(group: Slots, start: int, stop: int) -> None:
    """Raise H2OStreamError unless a group holds all tokens from `start` up to `stop` that each row has."""
    seen, window = max(group.tokens.lengths, default=0), group.plan.window
    stop = min(stop, seen)
    if stop <= start or seen <= window:
        return
    wanted, rows = numpy.arange(start, stop), zip(group.token_indices, group.tokens.lengths, strict=True)
    if not all(numpy.isin(wanted[wanted < length], head).all() for heads, length in rows for head in heads):
        raise H2OStreamError(
            f"of the tokens {start} to {stop} some have been evicted, {seen} were seen in a window of {window}; "
            "pin tokens before they pass the window"
        )


def still_needed(ranges: Sequence[range], groups: Sequence[Slots], seen: int) -> tuple[range, ...]:
    """Those ranges of which a head holds a token, or of which tokens may come in a row of `seen` tokens."""
    indices = [group.token_indices.ravel() for group in groups if group.is_initialized]
    index = numpy.concatenate(indices) if indices else numpy.empty(0, numpy.int32)
    return tuple(
        tokens
        for tokens in ranges
        if tokens.stop > seen or bool(((index >= tokens.start) & (index < tokens.stop)).any())
    )
