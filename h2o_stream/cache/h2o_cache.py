"""The cache of fixed slots in tensors, as transformers takes it: memory does not grow with the stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from h2o_stream.cache.arguments import check_forward, tokens_in
from h2o_stream.cache.arrays import to_arrays, to_tensors
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.layer import LayeredCache, LayerSpec, kept_by
from h2o_stream.cache.recurrent import HeldRows, RecurrentLayer, load_states, states_of
from h2o_stream.cache.shared_state import Revision
from h2o_stream.cache.slot_cache import SlotCache
from h2o_stream.cache.state import Array, refusing_damage, with_prefix
from h2o_stream.cache.tearing import marks_tears
from h2o_stream.config import CacheConfig
from h2o_stream.errors import H2OStreamError


@marks_tears
class H2OCache(SlotCache, LayeredCache):
    """A fixed window of slots per decoder layer, in tensors, of several streams: what transformers asks of a cache.

    Args:
        config: windows and rules.
        specs: what the cache must know of each decoder layer.
        max_distance: largest distance the model was trained for, or None.
        last_position: number of learned positions, which nothing can exceed; None for rotary ones.
        model_digest: identifies the model when a state is saved or loaded.

    Attributes:
        layers: an `EvictingLayer` per decoder layer; a `RecurrentLayer` where it has states, as in hybrids.
        recurrent_layers: the layers that have states.
        continues: whether several tokens at once can continue a stream; if not, they are fed one by one.
    """

    specs: tuple[LayerSpec, ...]
    continues = True

    def __init__(
        self,
        config: CacheConfig,
        specs: Sequence[LayerSpec],
        max_distance: int | None,
        last_position: int | None = None,
        model_digest: Callable[[], str] = lambda: "",
    ) -> None:
        self._last_position = last_position
        self._held_rows = HeldRows((), ())
        self.storage_device = None if config.device == "auto" else torch.device("cpu")
        on_disk = config.device == "disk"
        placed = [replace(spec, device=self.storage_device or spec.device, on_disk=on_disk) for spec in specs]
        self.device = next((spec.device for spec in placed), None)
        super().__init__(config, placed, max_distance, model_digest)

    def make_groups(self, revision: Revision) -> None:
        """Make empty head groups for the plan."""
        made = [spec.make_layer(self.plan, number, self.tokens, revision) for number, spec in enumerate(self.specs)]
        Cache.__init__(self, layers=made)  # of MiniMax, see `as_class_for`, the next class is another
        self.by_layer = [layer.head_groups for layer in made]
        self.recurrent_layers = [layer for layer in made if isinstance(layer, RecurrentLayer)]

    # what they hold

    @property
    def holders(self) -> tuple[HeadGroup | RecurrentLayer, ...]:
        """Everything that holds tensors."""
        return (*self.head_groups, *self.recurrent_layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen, evicted ones and padding included: what `generate` counts with."""
        return self.tokens.columns

    @property
    def nbytes(self) -> int:
        """See `SlotCache`."""
        return sum(holder.nbytes for holder in self.holders)

    def kept(self, layer: int = 0) -> Tensor:
        """[B, Hkv, n] int64: indices of the tokens a layer holds, oldest first; shorter rows have -1 in front.

        An index counts the tokens of its row, so that a row of a padded batch holds what it would hold alone.
        """
        return kept_by(self.layers[layer].head_groups)

    make_room = torch.inference_mode(False)(SlotCache.make_room)
    make_room_for_prompt = torch.inference_mode(False)(SlotCache.make_room_for_prompt)
    count_token = torch.inference_mode(False)(SlotCache.count_token)
    count_prompt = torch.inference_mode(False)(SlotCache.count_prompt)

    def recurrent_states(self, layer: int, shapes: Mapping[str, tuple[int, ...]], rows: int) -> list[Any]:
        """The states of a layer that native code updates in place, zero before the first token."""
        states: list[Any] = self.layers[layer].in_float32(shapes, rows)
        return states

    def use_own_dtypes(self) -> None:
        """Prepare recurrent states for the model's own forward, after native ones."""
        for layer in self.recurrent_layers:
            layer.use_own_dtypes()

    # streams

    def release_layers(self) -> None:
        """Release the slots and states of all layers."""
        Cache.reset(self)
        self.padding = None

    def state_dict(self) -> dict[str, Tensor]:
        """See `SlotCache.state_dict`: tensors on the CPU, as safetensors takes them."""
        return to_tensors(super().state_dict())

    def states(self) -> list[dict[str, Array]]:
        """The recurrent states of each layer, by name."""
        return [to_arrays(states_of(layer)) for layer in self.layers]

    def load_states(self, state: Mapping[str, Array], rows: int) -> None:
        """Take the recurrent states of all layers from a state of so many rows."""
        for number, (layer, spec) in enumerate(zip(self.layers, self.specs, strict=True)):
            if spec.states:
                saved = to_tensors(with_prefix(state, f"{number}."))
                load_states(layer, saved, rows, spec.state_shapes, spec.device)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state, in place of what is held: the next token is what it would have been."""
        with refusing_damage():
            arrays = to_arrays(state)
        super().load_state_dict(arrays)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row beam_idx[i], scores and ranks included; H2OStreamError if the disk is full."""
        if self.tokens.lengths:
            for holder in self.holders:
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
            ConfigError: the attention mask is not one of padding, positions are not those of one text, or windows do
                not fit the first prompt.
            H2OStreamError: the tokens exceed the last learned position, or rows are missing.
        """
        self.take_back()
        tokens = tokens_in(kwargs)
        batch, new = tokens.shape[:2]
        lengths = self.tokens.lengths or (0,) * batch
        self.padding = padding = check_forward(kwargs, lengths, self.tokens.columns, self._last_position is not None)
        if self._waits_for_prompt:
            self.begin(new)
        counts = padding.counts if padding else (new,) * batch
        self.tokens.expect(counts, new)
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
        self.tokens.advance()
