"""The cache of fixed slots: memory does not grow with the stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from h2o_stream.cache.arguments import check_forward, tokens_in
from h2o_stream.cache.cache_state import load_state, state_of
from h2o_stream.cache.counts import CacheCounts, Occupancy
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.kernels import Kernels
from h2o_stream.cache.layer import LayeredCache, LayerSpec, kept_by
from h2o_stream.cache.one_thread import OneThread
from h2o_stream.cache.padding import Padding
from h2o_stream.cache.policies import merged
from h2o_stream.cache.recurrent import HeldRows, RecurrentLayer
from h2o_stream.cache.shared_state import Revision, TokenCount
from h2o_stream.cache.state import check_saveable, refusing_damage
from h2o_stream.cache.statistics import LayerStatistics, layer_statistics
from h2o_stream.cache.tearing import marks_tears
from h2o_stream.cache.window_assignment import BudgetAssignment, check_not_evicted, still_needed, without
from h2o_stream.config import DEFAULT_WINDOW, CacheConfig
from h2o_stream.errors import ConfigError, H2OStreamError


@marks_tears
class H2OCache(LayeredCache):
    """A fixed window of slots per decoder layer: pins, streams, and what transformers asks of a cache.

    Args:
        config: budgets and rules.
        specs: the decoder layers.
        max_distance: largest distance the model was trained for, or None.
        last_position: number of learned positions, which nothing can exceed; None for rotary ones.
        model: identifies the model when a state is saved or loaded.

    Attributes:
        storage_device: where all keys and values are kept and attended to; None for where each layer computes.
        layers: an `EvictingLayer` per decoder layer; a `RecurrentLayer` where it has states, as in hybrids.
        head_groups: those of all layers, in order.
        recurrent_layers: those of the layers with states.
        tokens: counts the tokens of the stream.
        one_thread: inside it the cache is changed.
        engine_note: what runs the steps and why, for people: "native, avx512" or "eager: ..."; set by `attach`.
        continues: whether several tokens at once can continue a stream; if not, they are fed one by one.
        torn: a forward or a reset was cut off halfway; only `reset` helps.
        stream_number: grows with every `reset` and every state that is loaded, which distinguishes streams.
    """

    engine_note = ""
    torn = False
    continues = True
    stream_number = 0

    def __init__(
        self,
        config: CacheConfig,
        specs: Sequence[LayerSpec],
        max_distance: int | None,
        last_position: int | None = None,
        model: Callable[[], str] = lambda: "",
    ) -> None:
        self.one_thread = OneThread()  # first, so that copying is refused before anything is copied
        self.config, self.model, self.max_distance, self._last_position = config, model, max_distance, last_position
        self.storage_device = None if config.device == "auto" else torch.device("cpu")
        on_disk = config.device == "disk"
        self.specs = tuple(replace(spec, device=self.storage_device or spec.device, on_disk=on_disk) for spec in specs)
        self.padding: Padding | None = None
        self.resolved = not config.by_ratio
        self._revision = Revision()
        self._kernels: Kernels | None = None
        self._occupancy_cache: Occupancy | None = None
        self._arriving: tuple[Sequence[int], int] = (), 0
        self._held_rows = HeldRows((), ())
        self.build(DEFAULT_WINDOW)

    def build(self, prompt: int, pins: tuple[range, ...] = (), transient: tuple[range, ...] = ()) -> None:
        """Make the plan, by the length of the first prompt if the budgets are ratios of it, and empty layers."""
        self.first_prompt = prompt
        self.plan = self.config.for_prompt(prompt).plan(self.max_distance)
        self.tokens = TokenCount()
        made = [spec.make_layer(self.plan, n, self.tokens, self._revision) for n, spec in enumerate(self.specs)]
        Cache.__init__(self, layers=made)  # of MiniMax, see `accepted_by`, the next class is another
        self.head_groups = [group for layer in made for group in layer.head_groups]
        self.recurrent_layers = [layer for layer in made if isinstance(layer, RecurrentLayer)]
        self.budgets = BudgetAssignment(self.plan, self.specs, self.max_distance, pins, transient)
        self.kernels = self._kernels
        self.assign_budgets()

    @property
    def revision(self) -> int:
        """See `Revision`."""
        return self._revision.number

    @property
    def kernels(self) -> Kernels | None:
        """Used instead of the eager ones, where they can be; None for nowhere."""
        return self._kernels

    @kernels.setter
    def kernels(self, kernels: Kernels | None) -> None:
        self._kernels = kernels
        for group in self.head_groups:
            group.kernels = kernels
        self._revision.bump()

    # layers and what they hold

    @property
    def evicting_layers(self) -> list[int]:
        """Indices of the layers that follow the plan: those with attention and no sliding window of their own."""
        return [number for number, spec in enumerate(self.specs) if spec.evicts]

    @property
    def evicting_groups(self) -> list[HeadGroup]:
        """The head groups of the layers that follow the plan."""
        return [group for number in self.evicting_layers for group in self.layers[number].head_groups]

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
        if self._occupancy_cache is None or self._occupancy_cache.revision != self.revision:
            self._occupancy_cache = Occupancy.of(self)
        return self._occupancy_cache

    def statistics(self) -> list[LayerStatistics]:
        """Sparsity, scores and kept attention of every layer that evicts, of the stream so far."""
        return [layer_statistics(number, self.layers[number].head_groups) for number in self.evicting_layers]

    # what is protected, and what is not

    @property
    def pins(self) -> tuple[range, ...]:
        """Ranges of token indices that are never evicted, in order, without the policy's sinks."""
        return self.budgets.pins

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
        if self.resolved:
            self.budgets.check(pins, self._windows_fixed)
        for group in self.evicting_groups:
            check_not_evicted(group, start, stop)
        self.budgets.pins = pins
        self.assign_budgets()

    def check_pin(self, count: int) -> None:
        """Check that the first `count` tokens of a new stream can be pinned alone.

        Raises:
            ConfigError: see `pin`.
        """
        if not self.config.by_ratio:
            self.budgets.check((range(count),), fixed=False)

    def unpin(self, start: int = 0, stop: int | None = None) -> None:
        """Let the tokens from `start` up to `stop`, or all from `start` on, be evicted again."""
        self.budgets.pins = without(self.pins, start, stop)
        self.assign_budgets()

    @property
    def transient(self) -> tuple[range, ...]:
        """Ranges of token indices that are evicted first, in order; some head may still hold some of each."""
        return self.budgets.transient

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
        self.budgets.transient = still_needed(ranges, self.evicting_groups, min(self.tokens.lengths, default=0))
        self.assign_budgets()

    def assign_budgets(self) -> None:
        """Bring windows and budgets up to date with pins, transient tokens and the length of the stream."""
        self.budgets.assign(self.evicting_groups, self._windows_fixed)
        schedules = {group.schedule for group in self.head_groups}
        self._settled = max(schedule.settled for schedule in schedules)
        self._stage_ends = frozenset(end for schedule in schedules for end in schedule.stages)
        self._revision.bump()

    @property
    def _windows_fixed(self) -> bool:
        """Whether some heads may have left the common window, so that the windows cannot change any more."""
        return self.seen_tokens > self.plan.window

    # streams

    def begin(self, prompt: int) -> None:
        """Tell an empty cache the length of the first prompt, if it is fed in parts: ratios are resolved by it.

        Raises:
            ConfigError: budgets or pins do not fit.
        """
        if self.config.by_ratio and not self.seen_tokens:
            self.build(prompt, self.pins, self.transient)
            self.budgets.check(self.pins, fixed=False, by_ratio=True)
            self.resolved = True

    def reset(self) -> None:
        """Forget the stream and what of it is evicted first, and release the slots; pins stay."""
        self.torn = True
        super().reset()
        self.tokens.reset()
        self.padding = None
        self.resolved = not self.config.by_ratio
        self.budgets.transient = ()
        self.assign_budgets()
        self.stream_number += 1
        self.torn = False

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of everything needed to continue exactly: tensors by name, as safetensors takes them.

        Raises:
            H2OStreamError: the cache is empty, or the last forward was cut off halfway.
        """
        check_saveable(self.torn, self.seen_tokens)
        return state_of(self)

    def restored(self, state: Mapping[str, Tensor]) -> H2OCache:
        """A copy that holds what a state has, for looking at it; no model is attached to it. Raises the same errors."""
        loaded = copy(self)
        with refusing_damage():
            load_state(loaded, state)
        return loaded

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state, in place of what is held: the next token is what it would have been.

        Raises:
            H2OStreamError: the state belongs to another model, dtype or policy, or is damaged. The cache is unchanged.
        """
        loaded = self.restored(state)
        self.__dict__.update(loaded.__dict__, torn=False, stream_number=self.stream_number + 1)
        self._revision.bump()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row beam_idx[i], scores and ranks included."""
        if self.tokens.lengths:
            holders: tuple[HeadGroup | RecurrentLayer, ...] = (*self.head_groups, *self.recurrent_layers)
            for holder in holders:
                holder.select_rows(beam_idx)
            self.tokens.select_rows(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes `repeats` rows."""
        self.reorder_cache(torch.arange(len(self.tokens.lengths), device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at `indices`."""
        self.reorder_cache(indices)

    # forwards

    def prepare_forward(self, kwargs: dict[str, Any]) -> None:
        """Adapt the keyword arguments of the model's forward to this cache, in place.

        Raises:
            ConfigError: the attention mask is not one of padding, positions are not those of one text, or budgets do
                not fit the first prompt.
            H2OStreamError: the tokens exceed the last learned position, or rows are missing.
        """
        tokens = tokens_in(kwargs)
        batch, new = tokens.shape[:2]
        lengths = self.tokens.lengths or (0,) * batch
        self.padding = padding = check_forward(kwargs, lengths, self.tokens.columns, self._last_position is not None)
        if not self.resolved:
            self.begin(new)
        counts = padding.counts if padding else (new,) * batch
        self._arriving = counts, new
        self._held_rows = HeldRows(self.recurrent_layers, [row for row, count in enumerate(counts) if not count])
        kwargs["h2o_cache"] = self
        if self.plan.positions != "absolute":
            kwargs["position_ids"] = torch.zeros(batch, new, dtype=torch.int64, device=tokens.device)
            return
        longest = max(map(sum, zip(lengths, counts, strict=True)))
        if self._last_position is not None and longest > self._last_position:
            raise H2OStreamError(
                f"{longest} tokens pass the {self._last_position} positions the model has learned; nothing lies beyond"
            )
        seen = torch.tensor(lengths, device=tokens.device)
        if padding is not None:
            kwargs["position_ids"] = padding.positions(seen)
        else:
            kwargs["position_ids"] = seen[:, None] + torch.arange(new, device=tokens.device)

    def count_forward(self) -> None:
        """Count the tokens of the forward that was prepared: all layers have taken them."""
        self._held_rows.restore()
        self.tokens.advance(*self._arriving)

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

    def begin_token(self) -> None:
        """A native step is about to write the slots of all layers."""
        self.torn = True

    def count_token(self) -> None:
        """A native step has taken a token of each row through the slots of all layers."""
        self.count_forward()
        for group in self.head_groups:
            if group.filled < group.store.slots:
                group.filled += 1
        if not self._stage_ends.isdisjoint(length - 1 for length in self.tokens.lengths):
            for group in self.head_groups:
                group.fit(self.tokens.lengths)
