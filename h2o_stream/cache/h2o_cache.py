"""The cache of fixed slots: a window per decoder layer, its pins, its streams and its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from math import isfinite
from statistics import StatisticsError, fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from h2o_stream.cache.arguments import check_past, check_positions, check_rows, tokens_in
from h2o_stream.cache.audit import check_slots
from h2o_stream.cache.budgets import HeadBudget, Schedule, schedules, windows
from h2o_stream.cache.counts import CacheCounts, Occupancy
from h2o_stream.cache.groups import GroupedLayer
from h2o_stream.cache.identity import policy_source
from h2o_stream.cache.revision import Revision
from h2o_stream.cache.padding import Padding
from h2o_stream.cache.policies import Budget, make_policy, merged
from h2o_stream.cache.rope import RotaryTable
from h2o_stream.cache.head_group import Kernels, HeadGroup
from h2o_stream.cache.state import (
    FINGERPRINT,
    check_saveable,
    check_fingerprint,
    checksummed,
    refusing_damage,
    encode_json,
    require_tensor,
    decode_json,
    verify_checksums,
    whole_numbers,
    within,
)
from h2o_stream.cache.statistics import LayerStatistics
from h2o_stream.cache.tearing import marks_tears
from h2o_stream.config import DEFAULT_WINDOW, MIN_EVICTABLE, CacheConfig
from h2o_stream.errors import ConfigError, H2OStreamError

if TYPE_CHECKING:
    from h2o_stream.cache.verification import Verification


@dataclass(frozen=True)
class LayerSpec:
    """What the cache must know of a decoder layer.

    Attributes:
        table: rotations for ``rolling`` and ``gap``; None when the model rotates by itself (``absolute``).
        sliding: the sliding window of a layer among others that have none: it is left alone. None for the others.
        hidden_from: age in tokens from which the model hides keys from this layer, or None.
        device: where the layer computes; None for the CPU.
        groups: its KV heads, by the size of their windows.
        shard: the KV heads that are in this process, where several share the layer (tensor parallel); None for all.
    """

    table: RotaryTable | None = None
    sliding: int | None = None
    hidden_from: int | None = None
    device: torch.device | None = None
    groups: tuple[HeadBudget, ...] = (HeadBudget(),)
    shard: range | None = None

    @property
    def here(self) -> tuple[HeadBudget | None, ...]:
        """The part of each group that is in this process, its heads counted from the first one here; None for none."""
        if self.shard is None:
            return self.groups
        first = self.shard.start
        own = [tuple(head - first for head in group.heads if head in self.shard) for group in self.groups]
        return tuple(
            replace(group, heads=heads) if heads or not group.heads else None
            for group, heads in zip(self.groups, own, strict=True)
        )


def _slots(layers: Iterable[HeadGroup | GroupedLayer]) -> list[HeadGroup]:
    return [part for layer in layers for part in (layer.parts if isinstance(layer, GroupedLayer) else (layer,))]


def _whole(groups: Sequence[HeadBudget]) -> bool:
    """Whether groups of heads make up a layer."""
    heads = sorted(head for group in groups for head in group.heads)
    named = heads == list(range(len(heads))) and (len(groups) == 1 or all(group.heads for group in groups))
    return bool(groups) and named and all(isfinite(group.share) and group.share > 0 for group in groups)


@marks_tears
class H2OCache(Cache):
    """A fixed window of slots per decoder layer; memory does not grow with the stream.

    Args:
        config: budgets and rules.
        layers: what is to be known of every decoder layer.
        reach: distances the model was trained for, or None.
        last_position: positions a model has learned one by one, which nothing can pass; None for rotary ones.
        model: tells the model apart from others, when a state is saved or loaded.

    Attributes:
        place: where all keys and values are kept and attended to; None for where each layer computes.
        slots: those of all layers and groups of heads, one after the other.
        proof: what `attach` proved of the model, for native code to be proved by; None where nobody did.
        engine_note: what runs the steps and why, "native, avx512" or "eager: ...", for people; `attach` knows.
        torn: a forward or a reset was cut off halfway: there is nothing to go on from before the next `reset`.
        stream_number: grows with every `reset` and every state that is loaded, so that streams can be told apart.
    """

    engine_note = ""
    torn = False
    stream_number = 0
    proof: Verification | None = None

    def __init__(
        self,
        config: CacheConfig,
        layers: Sequence[LayerSpec],
        reach: int | None,
        last_position: int | None = None,
        model: Callable[[], str] = lambda: "",
    ) -> None:
        self.config = config
        self.place = torch.device("cpu") if config.device == "cpu" else None
        self._model = model
        self._prompt = DEFAULT_WINDOW
        self.padding: Padding | None = None
        self._specs = tuple(replace(spec, device=self.place or spec.device) for spec in layers)
        self._reach = reach
        self._last_position = last_position
        self._pins: tuple[range, ...] = ()
        self._windows: tuple[int, ...] = ()
        self._resolved = not config.by_ratio
        self._kernels: Kernels | None = None
        self._known: Occupancy | None = None
        self._layout = Revision()
        self._resolve(self._prompt)

    @property
    def layout(self) -> int:
        """Grows whenever a tensor is allocated anew or released, or what governs the slots changes.

        As long as it stays the same, addresses of tensors stay valid, and so do windows, pins, budgets and rows.
        """
        return self._layout.version

    @property
    def kernels(self) -> Kernels | None:
        """Serve the layers in place of the eager ones, where they can; None for nowhere."""
        return self._kernels

    @kernels.setter
    def kernels(self, kernels: Kernels | None) -> None:
        self._kernels = kernels
        for layer in self.slots:
            layer.kernels = kernels
        self._layout.changed()

    def _resolve(self, prompt: int) -> None:
        """Make the plan, by the length of the first prompt where it is asked for by ratio, and empty layers."""
        self._prompt = prompt
        self.plan = self.config.for_prompt(prompt).plan(self._reach)
        super().__init__(layers=[self._layer(number, spec) for number, spec in enumerate(self._specs)])
        self.slots = _slots(self.layers)
        self.kernels = self._kernels
        self._share()

    def _layer(self, number: int, spec: LayerSpec) -> HeadGroup | GroupedLayer:
        plan = self.plan
        if spec.sliding is None:
            own = [group for group in spec.here if group]
            policy, layout = make_policy(plan, number), self._layout
            groups = [HeadGroup(plan, policy, spec.table, spec.hidden_from, layout) for _ in own]
            heads = [torch.tensor(group.heads, device=spec.device) for group in own]
            return groups[0] if len(groups) == 1 else GroupedLayer(groups, heads)
        # A sliding layer holds what its own window shows, in full precision, at true distances.
        alone = replace(
            plan, policy="recent", window=spec.sliding - 1, sinks=0, heavy=0, recent=spec.sliding - 1, kv_bits=16
        )
        alone = alone if plan.positions == "absolute" else replace(alone, positions="rolling")
        return HeadGroup(alone, make_policy(alone), spec.table, spec.sliding, self._layout)

    @property
    def _groups(self) -> list[HeadBudget]:
        return [group for spec in self._specs if spec.sliding is None for group in spec.groups]

    @property
    def _here(self) -> list[HeadBudget | None]:
        """`_groups`, as far as they are in this process."""
        return [group for spec in self._specs if spec.sliding is None for group in spec.here]

    @property
    def evicting_layers(self) -> list[int]:
        """Which layers follow the plan: all but those with a sliding window of their own."""
        return [number for number, spec in enumerate(self._specs) if spec.sliding is None]

    @property
    def evicting(self) -> list[HeadGroup]:
        """The slots that follow the plan: one for each group of heads."""
        return _slots(self.layers[number] for number in self.evicting_layers)

    @property
    def seen_tokens(self) -> int:
        """Tokens fed since the start of the stream, of the longest row; padding is none."""
        return max(self.layers[0].lengths, default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and bookkeeping of all layers."""
        return self._occupancy.nbytes

    def kept(self, layer: int = 0) -> Tensor:
        """[B, Hkv, n] int64: indices of the tokens a layer holds, oldest first; shorter rows have -1 in front.

        An index counts the tokens of its row, so that a row of a padded batch holds what it would hold alone.
        """
        kept: Tensor = self.layers[layer].kept()
        return kept

    def counts(self) -> CacheCounts:
        """Where the tokens are now, of the longest row; means over the heads of the layers that evict."""
        return self._occupancy.counts(self.seen_tokens)

    @property
    def _occupancy(self) -> Occupancy:
        if self._known is None or self._known.revision != self.revision:
            groups = Counter[tuple[Schedule, int]]()
            for group, layer in zip((group for group in self._here if group), self.evicting, strict=True):
                groups[layer.schedule, layer.budget.recent] += group.count
            nbytes = sum(layer.nbytes for layer in self.slots)
            plan = self.plan
            self._known = Occupancy(self.revision, plan.window, nbytes, plan.sinks, self._protected, dict(groups))
        return self._known

    def statistics(self) -> list[LayerStatistics]:
        """Sparsity, scores and kept attention of every layer that evicts, of the stream so far."""
        return [self.layers[number].statistics(number) for number in self.evicting_layers]

    # pins

    @property
    def pins(self) -> tuple[range, ...]:
        """Ranges of token indices that are never evicted, in order; the policy's sinks are not among them."""
        return self._pins

    @property
    def _protected(self) -> tuple[range, ...]:
        """Ranges of token indices that are never evicted, sinks and pins."""
        return merged((range(self.plan.sinks), *self._pins))

    def pin(self, start: int, stop: int) -> None:
        """Never evict the tokens from index `start` up to `stop`, in any row, whether they were fed yet or not.

        Pins stay when a new stream begins. Heavy and recent slots share what pins leave in their proportion.

        Raises:
            ConfigError: fewer than `MIN_EVICTABLE` slots would be left to move in.
            H2OStreamError: some of these tokens have been evicted already.
        """
        if not 0 <= start <= stop:
            raise ConfigError(
                f"tokens {start} to {stop} cannot be pinned; a pin starts at 0 or later and ends after it"
            )
        pins = merged((*self._pins, range(start, stop)))
        if self._resolved:
            self._check(pins)
        for layer in self.evicting:
            self._check_held(layer, start, min(stop, self.seen_tokens))
        self._pins = pins
        self._share()

    def unpin(self, start: int = 0, stop: int | None = None) -> None:
        """Let the tokens from `start` up to `stop`, or all from `start` on, be evicted again."""
        rest = []
        for pin in self._pins:
            after = pin.stop if stop is None else max(min(stop, pin.stop), pin.start)
            rest += [range(pin.start, min(start, pin.stop)), range(max(after, pin.start), pin.stop)]
        self._pins = merged(rest)
        self._share()

    def _check(self, pins: tuple[range, ...]) -> None:
        plan = self.plan
        pinned = sum(map(len, merged((range(plan.sinks), *pins))))
        window = min(self._windows) if self._shared_out else plan.window
        if pinned > plan.sinks and window - pinned < self._least:
            whose = "of some heads " if window < plan.window else ""
            raise ConfigError(
                f"{pinned} pinned tokens (system prompt, sinks, pins) leave {max(window - pinned, 0)} of a window "
                f"{whose}of {window}, at least {self._least} must be left; raise --window to "
                f"{plan.window + pinned + self._least - window} or pin less (a shorter system prompt)"
            )

    def _check_held(self, layer: HeadGroup, start: int, stop: int) -> None:
        if stop <= start or max(layer.lengths) <= self.plan.window:
            return
        wanted = torch.arange(start, stop, device=layer.device)
        held = (layer.index.unsqueeze(-1) == wanted).any(2)
        owed = wanted < layer.seen
        if not bool((held | ~owed).all()):
            raise H2OStreamError(
                f"of the tokens {start} to {stop} some have been evicted, {max(layer.lengths)} were seen in a window "
                f"of {self.plan.window}; pin tokens before they pass the window"
            )

    def _share(self) -> None:
        """Give pins their slots and the heads their shares of the rest; heavy and recent split it as before."""
        plan, pinned = self.plan, sum(map(len, self._protected))
        if not self._shared_out:
            self._schedule(windows(self._groups, plan.window, pinned, self._least, self._most))
        for layer in self.evicting:
            movable = layer.schedule.window - pinned
            recent = movable - movable * plan.heavy // (plan.heavy + plan.recent)
            layer.budget = Budget(plan.sinks, self._pins, max(recent, self._least_recent))
        self._settled = max(layer.schedule.settled for layer in self.slots)
        self._layout.changed()

    def _schedule(self, sizes: Sequence[int]) -> None:
        """Give the heads their windows, and distances that the model knows."""
        counts = tuple(group.count for group in self._groups)
        self._windows = tuple(sizes)
        everywhere = zip(self._here, schedules(self._windows, counts, self.plan.window), strict=True)
        for layer, schedule in zip(self.evicting, (own for group, own in everywhere if group), strict=True):
            layer.follow(schedule)
            if self._reach is not None and self.plan.positions == "gap":
                room = self._reach - schedule.window - (self.plan.chunk or 1)
                layer.span = min(self.plan.span, room)

    @property
    def _shared_out(self) -> bool:
        """Whether some heads may have left the common window, so that the windows cannot change any more."""
        return self.seen_tokens > self.plan.window

    @property
    def _most(self) -> int | None:
        """The largest window: half the distances the model knows are left for the gaps between kept tokens."""
        if self._reach is None:
            return None
        return max(self.plan.window, (self._reach - (self.plan.chunk or 1)) // 2)

    @property
    def _least(self) -> int:
        """Tokens that every head needs beside the pinned ones."""
        return max(MIN_EVICTABLE, self._least_recent + 1)

    @property
    def _least_recent(self) -> int:
        """The newest tokens that pins must leave alone: one, or all that a quantized cache holds apart."""
        return self.plan.residual - 1 if self.plan.kv_bits < 16 else 1

    # a stream

    def begin(self, prompt: int) -> None:
        """Tell an empty cache how long the first prompt is, when it will be fed in parts: ratios resolve by it.

        Raises:
            ConfigError: budgets or pins do not fit.
        """
        if self.config.by_ratio and not self.seen_tokens:
            self._resolve(prompt)
            self._check(self._pins)
            self._resolved = True

    def reset(self) -> None:
        """Forget the stream and release the slots; pins stay."""
        self.torn = True
        super().reset()
        self.padding = None
        self._resolved = not self.config.by_ratio
        self._share()
        self.stream_number += 1
        self.torn = False

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of everything there is to go on from, exactly: tensors by name, as safetensors takes them.

        Raises:
            H2OStreamError: the cache is empty, or the last forward was cut off halfway.
        """
        check_saveable(self.torn, self.seen_tokens)
        state = {
            f"{number}.{name}": tensor.clone(memory_format=torch.contiguous_format)
            for number, layer in enumerate(self.layers)
            for name, tensor in layer.tensors().items()
        }
        state["pins"] = torch.tensor([(pin.start, pin.stop) for pin in self._pins], dtype=torch.int64).flatten()
        state["progress"] = torch.tensor([self.layers[0].columns, self._prompt])
        state["filled"] = torch.tensor([slots.filled for slots in self.slots])
        state["budgets"] = encode_json(
            {
                "groups": [[(group.heads, group.share) for group in spec.groups] for spec in self._specs],
                "windows": list(self._windows),
            }
        )
        state[FINGERPRINT] = encode_json(self._fingerprint(self.layers[0].dtype))
        return checksummed(state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state, in place of whatever is held: the next token is what it would have been.

        Raises:
            H2OStreamError: the state belongs to another model, dtype or policy, or is damaged. The cache is as it was.
        """
        loaded = copy(self)
        with refusing_damage():
            loaded._load(state, [slots.head_sizes for slots in self.slots if slots.is_initialized])
        self.__dict__.update(loaded.__dict__, torn=False, stream_number=self.stream_number + 1)
        self._layout.changed()

    def _load(self, state: Mapping[str, Tensor], sizes: Sequence[tuple[int, int]]) -> None:
        """Take over a state, as far as it goes; `sizes` are those of the heads, by slots, where they are known."""
        columns, prompt = whole_numbers(state, "progress", 2)
        self.plan = self.config.for_prompt(prompt).plan(self._reach)
        first = next((name for name in state if name.startswith("0.") and name.endswith("keys")), "0.keys")
        check_fingerprint(state, self._fingerprint(require_tensor(state, first).dtype))
        verify_checksums(state)
        self._take_budgets(decode_json(state, "budgets"), prompt)
        for number, (layer, spec) in enumerate(zip(self.layers, self._specs, strict=True)):
            layer.load(within(state, number), columns, spec.device)
        for slots, filled in zip(self.slots, whole_numbers(state, "filled", len(self.slots)), strict=True):
            slots.filled = filled
        pins = whole_numbers(state, "pins")
        self._resolved, self._pins = True, tuple(map(range, pins[::2], pins[1::2]))
        if len(pins) % 2 or self._pins != merged(self._pins) or not 0 < self.seen_tokens <= columns:
            raise H2OStreamError(
                f"the state is damaged: its pins are {pins}, and it has seen {self.seen_tokens} tokens"
            )
        for number, slots in enumerate(self.slots):
            if len(sizes) == len(self.slots) and sizes[number] != slots.head_sizes:
                raise H2OStreamError(f"the state does not fit: heads of slots {number} are of another size")
            check_slots(slots, f"slots {number}", self.slots[0].lengths)
        self._share()

    def _take_budgets(self, told: Mapping[str, Any], prompt: int) -> None:
        """The groups and windows of a saved stream, whatever was measured here, and empty layers for them."""
        try:
            groups = [tuple(HeadBudget(tuple(heads), share) for heads, share in layer) for layer in told["groups"]]
            self._specs = tuple(replace(spec, groups=those) for spec, those in zip(self._specs, groups, strict=True))
            sizes = told["windows"]
            mean = fmean(sizes, [group.count for group in self._groups])
            if not self.plan.window - 1 <= mean <= self.plan.window or not all(type(n) is int and n > 0 for n in sizes):
                raise ValueError(sizes)
            if not all(map(_whole, groups)):
                raise ValueError(groups)
            self._resolve(prompt)
            self._schedule(sizes)
        except (KeyError, TypeError, ValueError, StatisticsError) as error:
            raise H2OStreamError(f"the state does not fit: its budgets are {told}") from error

    def _fingerprint(self, dtype: torch.dtype) -> dict[str, Any]:
        fingerprint = {"dtype": str(dtype), "model": self._model(), "policy": asdict(self.plan)}
        return fingerprint | {"policy's source": policy_source(self.plan)}

    @property
    def steady(self) -> bool:
        """Whether every layer has come to its final size: the next token evicts one token from each, in every row."""
        lengths = self.layers[0].lengths
        return bool(lengths) and min(lengths) >= self._settled

    def begin_token(self) -> None:
        """The slots are written from now on."""
        self.torn = True

    def count_token(self) -> None:
        """Count a token of each row that a native step took through the slots of all layers, after `begin_token`."""
        lengths = tuple([length + 1 for length in self.layers[0].lengths])
        columns = self.slots[0].columns + 1
        for layer in self.slots:
            layer.columns, layer.lengths = columns, lengths
            layer.filled = min(layer.filled + 1, layer.store.slots)
        if min(lengths) <= self._settled:
            for layer in self.slots:
                layer.compact()

    def prepare_forward(self, kwargs: dict[str, Any]) -> None:
        """Adapt the keyword arguments of the model's forward to this cache, in place.

        Raises:
            ConfigError: the attention mask is not one of padding, positions are not those of one text, or budgets do
                not fit the first prompt.
            H2OStreamError: the tokens pass the last position the model has learned, or rows are missing.
        """
        tokens = tokens_in(kwargs)
        batch, new = tokens.shape[:2]
        lengths, columns = self.layers[0].lengths or (0,) * batch, self.layers[0].columns
        check_rows(len(lengths), batch)
        mask, given = kwargs.get("attention_mask"), kwargs.get("position_ids")
        padding = Padding.of(mask, batch, new)
        check_past(mask, lengths, columns, new)
        check_positions(given, lengths, columns, (batch, new), padding, self._last_position is not None)
        if not self._resolved:
            self.begin(new)
        self.padding = padding
        kwargs["h2o_cache"] = self
        if self.plan.positions != "absolute":
            kwargs["position_ids"] = torch.zeros(batch, new, dtype=torch.int64, device=tokens.device)
            return
        longest = max(map(sum, zip(lengths, padding.counts if padding else (new,) * batch, strict=True)))
        if self._last_position is not None and longest > self._last_position:
            raise H2OStreamError(
                f"{longest} tokens pass the {self._last_position} positions the model has learned; nothing lies beyond"
            )
        seen = torch.tensor(lengths, device=tokens.device)
        if padding is not None:
            kwargs["position_ids"] = padding.positions(seen)
        else:
            kwargs["position_ids"] = seen[:, None] + torch.arange(new, device=tokens.device)
