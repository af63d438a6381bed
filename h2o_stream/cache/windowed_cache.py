"""The layers of a cache of torch tensors: an `EvictingLayer` per decoder layer, or a recurrent one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.layer import LayeredCache, LayerSpec, kept_by
from h2o_stream.cache.recurrent import RecurrentLayer
from h2o_stream.cache.shared_state import Revision
from h2o_stream.cache.window_rules import WindowRules
from h2o_stream.config import CacheConfig


class WindowedCache(WindowRules[LayerSpec, HeadGroup], LayeredCache):
    """Layers with a fixed number of slots; see `H2OCache` for the arguments.

    Attributes:
        layers: an `EvictingLayer` per decoder layer; a `RecurrentLayer` where it has states, as in hybrids.
        recurrent_layers: those of the layers with states.
    """

    def __init__(
        self,
        config: CacheConfig,
        specs: Sequence[LayerSpec],
        max_distance: int | None,
        model_digest: Callable[[], str],
    ) -> None:
        self.model_digest = model_digest
        self.storage_device = None if config.device == "auto" else torch.device("cpu")
        on_disk = config.device == "disk"
        placed = [replace(spec, device=self.storage_device or spec.device, on_disk=on_disk) for spec in specs]
        super().__init__(config, placed, max_distance)

    def make_groups(self, revision: Revision) -> None:
        """See `WindowRules`."""
        made = [spec.make_layer(self.plan, number, self.tokens, revision) for number, spec in enumerate(self.specs)]
        Cache.__init__(self, layers=made)  # of MiniMax, see `as_class_for`, the next class is another
        self._head_groups = [group for layer in made for group in layer.head_groups]
        self.recurrent_layers = [layer for layer in made if isinstance(layer, RecurrentLayer)]

    @property
    def head_groups(self) -> list[HeadGroup]:
        """See `WindowRules`."""
        return self._head_groups

    def groups_of(self, layer: int) -> Sequence[HeadGroup]:
        """See `WindowRules`."""
        groups: Sequence[HeadGroup] = self.layers[layer].head_groups
        return groups

    def recurrent_states(self, layer: int, shapes: Mapping[str, tuple[int, ...]], rows: int) -> list[Any]:
        """See `WindowRules`."""
        states: list[Any] = self.layers[layer].in_float32(shapes, rows)
        return states

    def use_own_dtypes(self) -> None:
        """Prepare recurrent states for the model's own forward, after native ones."""
        for layer in self.recurrent_layers:
            layer.use_own_dtypes()

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
        """See `WindowRules`."""
        return sum(holder.nbytes for holder in self.holders)

    def kept(self, layer: int = 0) -> Tensor:
        """[B, Hkv, n] int64: indices of the tokens a layer holds, oldest first; shorter rows have -1 in front.

        An index counts the tokens of its row, so that a row of a padded batch holds what it would hold alone.
        """
        return kept_by(self.layers[layer].head_groups)

    make_room = torch.inference_mode(False)(WindowRules.make_room)
    make_room_for_prompt = torch.inference_mode(False)(WindowRules.make_room_for_prompt)
    release_room = torch.inference_mode(False)(WindowRules.release_room)
    release_room_of_prompt = torch.inference_mode(False)(WindowRules.release_room_of_prompt)
