"""What the windows of a stream hold: pins, transient tokens, windows that grow, counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from h2o_stream.cache.counts import CacheCounts, Occupancy
from h2o_stream.cache.layer_rules import LayerRules, sliding_plan
from h2o_stream.cache.one_thread import Tearable
from h2o_stream.cache.protection import merged, without
from h2o_stream.cache.shared_state import Revision, TokenCount
from h2o_stream.cache.window_assignment import WindowAssignment, check_not_evicted, still_needed
from h2o_stream.cache.window_growth import WindowGrowth
from h2o_stream.config import DEFAULT_WINDOW, CacheConfig, CachePlan
from h2o_stream.errors import ConfigError


class WindowRules(Tearable):
    """Rules of a stream with a fixed number of slots.

    Args:
        specs: what the cache must know of each decoder layer.
        max_distance: largest distance the model was trained for, or None.

    Attributes:
        plan: what the config means for this model, the first prompt and what is pinned.
        first_prompt: tokens of the first prompt of the stream, if the windows are ratios of it and it is known; or 0.
        tokens: counts the tokens of the stream.
        windows: the windows of the heads, and the pins.
        by_layer: the head groups of each layer.
        device: torch's device that holds the slots of the first layer; None for the host.
        model_digest, is_called: see `SlotCache`.
    """

    model_digest: Callable[[], str]
    is_called: Callable[[str], bool] = staticmethod(lambda digest: False)
    by_layer: list[tuple[Any, ...]]
    device: Any = None
    plan: CachePlan
    tokens: TokenCount
    windows: WindowAssignment

    def __init__(self, config: CacheConfig, specs: Sequence[LayerRules], max_distance: int | None) -> None:
        self.config, self.max_distance, self.specs = config, max_distance, tuple(specs)
        self._revision = Revision()
        self._occupancy_cache: Occupancy | None = None
        self.first_prompt = 0
        self.make_layers(DEFAULT_WINDOW)

    def make_layers(
        self, prompt: int, pins: tuple[range, ...] = (), transient: tuple[range, ...] = (), window: int = 0
    ) -> None:
        """Make the plan, by the length of the first prompt if the windows are ratios of it, and empty layers.

        Args:
            prompt: length of the first prompt.
            pins: pins that the window has to hold.
            transient: ranges of token indices that are evicted first.
            window: window that has grown already; 0 for as large as the pins need.

        Raises:
            ConfigError, OutOfMemoryError: see `pin`.
        """
        growth = self.growth(prompt)
        self.plan = growth.plan(window or growth.window(pins))
        self.tokens = TokenCount(self._revision)
        self.make_groups(self._revision)
        self.windows = WindowAssignment(self.plan, self.specs, self.max_distance, pins, transient)
        self.assign_windows()

    def start_stream(self) -> None:
        """Count from 0 again, without transient tokens; pins stay."""
        self.tokens.reset()
        self.first_prompt = 0
        self.windows.transient = ()
        self.windows.follow(self.plan)
        self._shrink()
        self.assign_windows()

    def make_groups(self, revision: Revision) -> None:
        """Make empty head groups for the plan."""
        makers = enumerate(spec.make_groups for spec in self.specs)
        self.by_layer = [tuple(make(self.plan, number, self.tokens, revision)) for number, make in makers]

    @property
    def head_groups(self) -> list[Any]:
        """Those of all layers, in order."""
        return [group for groups in self.by_layer for group in groups]

    def groups_of(self, layer: int) -> tuple[Any, ...]:
        """The head groups of a layer."""
        return self.by_layer[layer]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and bookkeeping of all layers."""
        return sum(group.nbytes for group in self.head_groups)

    @property
    def revision(self) -> int:
        """See `Revision`."""
        return self._revision.number

    @property
    def evicting_layers(self) -> list[int]:
        """Indices of the layers that follow the plan: those with attention and no sliding window of their own."""
        return [number for number, spec in enumerate(self.specs) if spec.evicts]

    @property
    def evicting_groups(self) -> list[Any]:
        """The head groups of the layers that follow the plan."""
        return [group for number in self.evicting_layers for group in self.groups_of(number)]

    # what they hold

    @property
    def seen_tokens(self) -> int:
        """Tokens fed since the start of the stream, without padding, of the longest row."""
        return max(self.tokens.lengths, default=0)

    def counts(self) -> CacheCounts:
        """Where the tokens are now, of the longest row; means over the heads of the layers that evict."""
        return self._occupancy.counts(self.seen_tokens)

    @property
    def _occupancy(self) -> Occupancy:
        known = self._occupancy_cache
        if known is None or known.revision != self.revision:
            known = Occupancy.of(self.evicting_groups, self.windows.protected, self.grown, self.revision, self.nbytes)
            self._occupancy_cache = known
        return known

    # what is protected, and what is not

    @property
    def pins(self) -> tuple[range, ...]:
        """Ranges of token indices that are never evicted, in order, without the policy's sinks."""
        return self.windows.pins

    def pin(self, start: int, stop: int) -> None:
        """Never evict the tokens from index `start` up to `stop`, in any row, whether they have been fed yet or not.

        Pins stay when a new stream begins. Heavy and recent slots share what pins leave in their proportion. Where that
        would be less than half of the configured window, the window grows by what is missing: from then on, nothing is
        evicted until the larger window is full. It shrinks again when a stream begins without pins.

        Raises:
            ConfigError: the model's context or the size of the cache does not allow so large a window.
            OutOfMemoryError: there is no memory for it.
            H2OStreamError: some of these tokens have been evicted already.
        """
        if not 0 <= start <= stop:
            raise ConfigError(
                f"tokens {start} to {stop} cannot be pinned; a pin starts at 0 or later and ends after it"
            )
        pins = merged((*self.pins, range(start, stop)))
        for group in self.evicting_groups:
            check_not_evicted(group, start, stop)
        plan = None if self._waits_for_prompt else self._larger_plan(pins)
        with self.writing():
            if plan is not None:
                fixed = self._windows_fixed
                self._follow(plan)
                if fixed:
                    self.windows.grow(self.evicting_groups, plan, self.seen_tokens)
                else:
                    self.windows.follow(plan)
            self.windows.pins = pins
            self.assign_windows()

    def check_pin(self, count: int) -> None:
        """Raise ConfigError or OutOfMemoryError if the first `count` tokens of a new stream cannot be pinned alone."""
        if not self.config.by_ratio:
            self.growth().window((range(count),))

    def unpin(self, start: int = 0, stop: int | None = None) -> None:
        """Let the tokens from `start` up to `stop`, or all from `start` on, be evicted again."""
        with self.writing():
            self.windows.pins = without(self.pins, start, stop)
            self._shrink()
            self.assign_windows()

    @property
    def transient(self) -> tuple[range, ...]:
        """Ranges of token indices that are evicted first, in order; some head may still hold some of each."""
        return self.windows.transient

    def evict_first(self, start: int, stop: int) -> None:
        """Evict the tokens from index `start` up to `stop`, in any row, before all others, the oldest first.

        While they are recent, pinned or sinks they stay. They need not have been fed yet. A new stream begins without
        such ranges, and those that no head holds any more are forgotten.

        Raises:
            ConfigError: this is not a range of token indices.
        """
        if not 0 <= start <= stop < 2**31:
            raise ConfigError(
                f"tokens {start} to {stop} cannot be evicted first; such a range starts at 0 or later, and ends after "
                f"it and below {2**31}"
            )
        ranges = merged((*self.transient, range(start, stop)))
        with self.writing():
            self.windows.transient = still_needed(ranges, self.evicting_groups, min(self.tokens.lengths, default=0))
            self.assign_windows()

    # windows

    def begin(self, prompt: int) -> None:
        """Tell an empty cache the length of a first prompt fed in parts, which resolves ratios; errors as of `pin`."""
        if self.config.by_ratio and not self.seen_tokens:
            self.make_layers(prompt, self.pins, self.transient)
            self.first_prompt = prompt

    @property
    def _waits_for_prompt(self) -> bool:
        """Whether windows are ratios of a first prompt that is not known yet."""
        return self.config.by_ratio and not self.first_prompt

    def growth(self, prompt: int = 0) -> WindowGrowth:
        """The window that was configured, and those that it may grow to; see `make_layers`."""
        shapes = [spec.shape for spec in self.specs if spec.evicts and spec.shape]
        width = sum(shape.kv_heads * (shape.key_size + shape.value_size) for shape in shapes)
        config = self.config.for_prompt(prompt or self.first_prompt or DEFAULT_WINDOW)
        return WindowGrowth(config, self.max_distance, width, self.device)

    @property
    def grown(self) -> int:
        """Slots that the window has beside the configured ones, for what is pinned."""
        return 0 if self._waits_for_prompt else self.plan.window - self.growth().config.window

    def _larger_plan(self, pins: tuple[range, ...]) -> CachePlan | None:
        """The plan whose window is what pins need; None if it is as large, or the stream cannot go on with a larger
        one. Errors as of `pin`.
        """
        growth, sizes = self.growth(), self.windows.sizes
        wanted, pinned = growth.window(pins), sum(map(len, merged((range(self.plan.sinks), *pins))))
        smallest = min(sizes) if self._windows_fixed else self.plan.window
        if pinned > self.plan.sinks:
            wanted = max(wanted, self.plan.window + pinned + growth.min_movable - smallest)
        if wanted <= self.plan.window:
            return None
        plan = growth.plan(min(wanted, growth.largest))
        more = plan.window - self.plan.window if self._can_follow(plan) else 0
        growth.check(pinned, smallest + more, "of some heads " if smallest < self.plan.window else "")
        return plan if more > 0 else None

    def _shrink(self) -> None:
        """Return to the configured window, in an empty stream without pins."""
        if not self.pins and not self.tokens.lengths and self.grown:
            self._follow(self.growth().plan())
            self.windows.follow(self.plan)

    def _can_follow(self, plan: CachePlan) -> bool:
        """Whether the stream can go on with this plan, which has a larger window."""
        before, lengths = self.plan, self.tokens.lengths
        stored = [(x.rule, x.sinks, x.exact_sinks, x.residual) for x in (before, plan)]
        return not lengths or (stored[0] == stored[1] and not (self._windows_fixed and len(set(lengths)) > 1))

    def _follow(self, plan: CachePlan) -> None:
        self.plan = plan
        for number, spec in enumerate(self.specs):
            for group in self.groups_of(number):
                group.follow(plan if spec.evicts else sliding_plan(plan, group.plan.window + 1))

    def assign_windows(self) -> None:
        """Bring windows and what they protect up to date with pins, transient tokens and the length of the stream."""
        self.windows.update(self.evicting_groups, self._windows_fixed)
        schedules = {group.schedule for group in self.head_groups}
        self._settled = max(schedule.settled for schedule in schedules)
        self._stage_ends = frozenset(end for schedule in schedules for end in schedule.stages)
        self._revision.bump()

    @property
    def _windows_fixed(self) -> bool:
        """Whether some heads may have left the common window, so that the windows cannot change any more."""
        return self.seen_tokens > self.plan.window - self.windows.added

    @property
    def steady(self) -> bool:
        """Whether every window has its final size: the next token evicts one token from each head, in every row."""
        lengths = self.tokens.lengths
        return bool(lengths) and min(lengths) >= self._settled
