"""The layers of a cache, made for a plan: how many tokens each head holds, and which of them are never evicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from h2o_stream.cache.counts import CacheCounts, Occupancy
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.layer import LayeredCache, LayerSpec, kept_by
from h2o_stream.cache.policies import merged
from h2o_stream.cache.recurrent import RecurrentLayer
from h2o_stream.cache.shared_state import Revision, TokenCount
from h2o_stream.cache.window_assignment import WindowAssignment, check_not_evicted, still_needed, without
from h2o_stream.config import DEFAULT_WINDOW, CacheConfig
from h2o_stream.errors import ConfigError


class WindowedCache(LayeredCache):
    """Layers with a fixed number of slots; see `H2OCache` for the arguments.

    Attributes:
        layers: an `EvictingLayer` per decoder layer; a `RecurrentLayer` where it has states, as in hybrids.
        head_groups: those of all layers, in order.
        recurrent_layers: those of the layers with states.
        plan: what the config means for this model and the first prompt.
        first_prompt: tokens of the first prompt of the stream, if the windows are ratios of it and it is known; or 0.
        tokens: counts the tokens of the stream.
        windows: the windows of the heads, and the pins.
    """

    def __init__(
        self,
        config: CacheConfig,
        specs: Sequence[LayerSpec],
        max_distance: int | None,
        model_digest: Callable[[], str],
    ) -> None:
        self.config, self.model_digest, self.max_distance = config, model_digest, max_distance
        self.storage_device = None if config.device == "auto" else torch.device("cpu")
        on_disk = config.device == "disk"
        self.specs = tuple(replace(spec, device=self.storage_device or spec.device, on_disk=on_disk) for spec in specs)
        self._revision = Revision()
        self._occupancy_cache: Occupancy | None = None
        self.first_prompt = 0
        self.make_layers(DEFAULT_WINDOW)

    def make_layers(self, prompt: int, pins: tuple[range, ...] = (), transient: tuple[range, ...] = ()) -> None:
        """Make the plan, by the length of the first prompt if the windows are ratios of it, and empty layers."""
        self.plan = self.config.for_prompt(prompt).plan(self.max_distance)
        self.tokens = TokenCount()
        made = [spec.make_layer(self.plan, n, self.tokens, self._revision) for n, spec in enumerate(self.specs)]
        Cache.__init__(self, layers=made)  # of MiniMax, see `as_class_for`, the next class is another
        self.head_groups = [group for layer in made for group in layer.head_groups]
        self.recurrent_layers = [layer for layer in made if isinstance(layer, RecurrentLayer)]
        self.windows = WindowAssignment(self.plan, self.specs, self.max_distance, pins, transient)
        self.assign_windows()

    @property
    def revision(self) -> int:
        """See `Revision`."""
        return self._revision.number

    @property
    def evicting_layers(self) -> list[int]:
        """Indices of the layers that follow the plan: those with attention and no sliding window of their own."""
        return [number for number, spec in enumerate(self.specs) if spec.evicts]

    @property
    def evicting_groups(self) -> list[HeadGroup]:
        """The head groups of the layers that follow the plan."""
        return [group for number in self.evicting_layers for group in self.layers[number].head_groups]

    # what they hold

    @property
    def holders(self) -> tuple[HeadGroup | RecurrentLayer, ...]:
        """Everything that holds tensors."""
        return (*self.head_groups, *self.recurrent_layers)

    @property
    def seen_tokens(self) -> int:
        """Tokens fed since the start of the stream, without padding, of the longest row."""
        return max(self.tokens.lengths, default=0)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen, evicted ones and padding included: what `generate` counts with."""
        return self.tokens.columns

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, recurrent states and bookkeeping of all layers."""
        return self._occupancy.nbytes

    def kept(self, layer: int = 0) -> Tensor:
        """[B, Hkv, n] int64: indices of the tokens a layer holds, oldest first; shorter rows have -1 in front.

        An index counts the tokens of its row, so that a row of a padded batch holds what it would hold alone.
        """
        return kept_by(self.layers[layer].head_groups)

    def counts(self) -> CacheCounts:
        """Where the tokens are now, of the longest row; means over the heads of the layers that evict."""
        return self._occupancy.counts(self.seen_tokens)

    @property
    def _occupancy(self) -> Occupancy:
        known = self._occupancy_cache
        if known is None or known.revision != self.revision:
            nbytes = sum(holder.nbytes for holder in self.holders)
            known = Occupancy.of(self.evicting_groups, self.windows.protected, self.revision, nbytes)
            self._occupancy_cache = known
        return known

    # what is protected, and what is not

    @property
    def pins(self) -> tuple[range, ...]:
        """Ranges of token indices that are never evicted, in order, without the policy's sinks."""
        return self.windows.pins

    def pin(self, start: int, stop: int) -> None:
        """Never evict the tokens from index `start` up to `stop`, in any row, whether they have been fed yet or not.

        Pins stay when a new stream begins. Heavy and recent slots share what pins leave in their proportion.

        Raises:
            ConfigError: fewer than `MIN_EVICTABLE` slots would be left to move in.
            H2OStreamError: some of these tokens have been evicted already.
        """
        if not 0 <= start <= stop:
            raise ConfigError(
                f"tokens {start} to {stop} cannot be pinned; a pin starts at 0 or later and ends after it"
            )
        pins = merged((*self.pins, range(start, stop)))
        if not self._waits_for_prompt:
            self.windows.check(pins, self._windows_fixed)
        for group in self.evicting_groups:
            check_not_evicted(group, start, stop)
        self.windows.pins = pins
        self.assign_windows()

    def check_pin(self, count: int) -> None:
        """Check that the first `count` tokens of a new stream can be pinned alone.

        Raises:
            ConfigError: see `pin`.
        """
        if not self.config.by_ratio:
            self.windows.check((range(count),), fixed=False)

    def unpin(self, start: int = 0, stop: int | None = None) -> None:
        """Let the tokens from `start` up to `stop`, or all from `start` on, be evicted again."""
        self.windows.pins = without(self.pins, start, stop)
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
        self.windows.transient = still_needed(ranges, self.evicting_groups, min(self.tokens.lengths, default=0))
        self.assign_windows()

    # windows

    def begin(self, prompt: int) -> None:
        """Tell an empty cache the length of the first prompt, if it is fed in parts: ratios are resolved by it.

        Raises:
            ConfigError: windows or pins do not fit.
        """
        if self.config.by_ratio and not self.seen_tokens:
            self.make_layers(prompt, self.pins, self.transient)
            self.windows.check(self.pins, fixed=False, by_ratio=True)
            self.first_prompt = prompt

    @property
    def _waits_for_prompt(self) -> bool:
        """Whether windows are ratios of a first prompt that is not known yet."""
        return self.config.by_ratio and not self.first_prompt

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
        return self.seen_tokens > self.plan.window

    @property
    def steady(self) -> bool:
        """Whether every window has its final size: the next token evicts one token from each head, in every row."""
        lengths = self.tokens.lengths
        return bool(lengths) and min(lengths) >= self._settled

    def make_room(self) -> None:
        """Allocate slots for a token of each row, which a native step does not."""
        if not self._stage_ends.isdisjoint(self.tokens.lengths):
            for group in self.head_groups:
                group.fit([length + more for length in self.tokens.lengths for more in (0, 1)])

    def release_room(self) -> None:
        """Note that a native step has taken a token of each row, and give up the slots that a stage no longer needs."""
        for group in self.head_groups:
            if group.filled < group.store.slots:
                group.filled += 1
        if not self._stage_ends.isdisjoint(length - 1 for length in self.tokens.lengths):
            for group in self.head_groups:
                group.fit(self.tokens.lengths)
