"""The cache of fixed slots: memory does not grow with the stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from h2o_stream.cache.arguments import check_forward, tokens_in
from h2o_stream.cache.arrays import to_array, to_arrays, to_tensors
from h2o_stream.cache.cache_state import load_state, state_of
from h2o_stream.cache.layer import LayerSpec
from h2o_stream.cache.one_thread import OneThread
from h2o_stream.cache.recurrent import HeldRows, load_states, states_of
from h2o_stream.cache.state import Array, check_saveable, refusing_damage, with_prefix
from h2o_stream.cache.tearing import marks_tears
from h2o_stream.cache.windowed_cache import WindowedCache
from h2o_stream.config import CacheConfig
from h2o_stream.errors import H2OStreamError


@marks_tears
class H2OCache(WindowedCache):
    """A fixed window of slots per decoder layer: streams, and what transformers asks of a cache.

    Args:
        config: windows and rules.
        specs: what the cache must know of each decoder layer.
        max_distance: largest distance the model was trained for, or None.
        last_position: number of learned positions, which nothing can exceed; None for rotary ones.
        model_digest: identifies the model when a state is saved or loaded.

    Attributes:
        one_thread: inside it the cache is changed.
        continues: whether several tokens at once can continue a stream; if not, they are fed one by one.
    """

    continues = True

    def __init__(
        self,
        config: CacheConfig,
        specs: Sequence[LayerSpec],
        max_distance: int | None,
        last_position: int | None = None,
        model_digest: Callable[[], str] = lambda: "",
    ) -> None:
        self.one_thread = OneThread()  # first, so that copying is refused before anything is copied
        self._last_position = last_position
        self._arriving: tuple[Sequence[int], int] = (), 0
        self._held_rows = HeldRows((), ())
        super().__init__(config, specs, max_distance, model_digest)

    # streams

    def reset(self) -> None:
        """Forget the stream and what of it is evicted first, and release the slots; pins stay."""
        with self.writing(anew=True):
            super().reset()
            self.padding = None
            self.start_stream()

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of everything needed to continue exactly: tensors on the CPU by name, as safetensors takes them.

        Raises:
            H2OStreamError: the cache is empty, or the last forward was cut off halfway.
        """
        check_saveable(self.torn, self.seen_tokens)
        recurrent = {
            f"{number}.{name}": to_array(state)
            for number, layer in enumerate(self.layers)
            for name, state in states_of(layer).items()
        }
        return to_tensors(state_of(self, recurrent))

    def restored(self, state: Mapping[str, Array]) -> H2OCache:
        """A copy that holds what a state has, for looking at it; no model is attached to it. Raises the same errors."""
        loaded = copy(self)
        with refusing_damage():
            load_state(loaded, state)
            self._check_head_sizes(loaded)
            rows = len(loaded.tokens.lengths)
            for number, (layer, before, spec) in enumerate(zip(loaded.layers, self.layers, self.specs, strict=True)):
                load_states(layer, to_tensors(with_prefix(state, f"{number}.")), rows, before, spec.device)
        return loaded

    def _check_head_sizes(self, loaded: H2OCache) -> None:
        """Check that heads are as large as those that are held now, if there are any."""
        for number, groups in enumerate(zip(self.head_groups, loaded.head_groups, strict=False)):
            sizes = [(g.store.keys.shape[-1], g.store.values.shape[-1]) for g in groups if g.is_initialized]
            if len(set(sizes)) > 1 and len(self.head_groups) == len(loaded.head_groups):
                raise H2OStreamError(f"the state does not fit: heads of slots {number} are of another size")

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state, in place of what is held: the next token is what it would have been.

        Raises:
            H2OStreamError: the state belongs to another model, dtype or policy, or is damaged. The cache is unchanged.
        """
        with refusing_damage():
            arrays = to_arrays(state)
        self.continue_as(self.restored(arrays))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row beam_idx[i], scores and ranks included.

        Raises:
            H2OStreamError: the memory has no room on disk. Nothing has changed.
        """
        if self.tokens.lengths:
            if self.memory is not None:
                self.memory.select_rows(beam_idx.tolist())
                self._revision.bump()
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
        tokens = tokens_in(kwargs)
        batch, new = tokens.shape[:2]
        lengths = self.tokens.lengths or (0,) * batch
        self.padding = padding = check_forward(kwargs, lengths, self.tokens.columns, self._last_position is not None)
        if self._waits_for_prompt:
            self.begin(new)
        counts = padding.counts if padding else (new,) * batch
        self._arriving = counts, new
        self.make_memory_room([*map(sum, zip(lengths, counts, strict=True))])
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
        """See `WindowRules`."""
        self._held_rows.restore()
        self.tokens.advance(*self._arriving)
