"""A decoder layer of the cache, as transformers sees it: a list of head groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from h2o_stream.cache.attention import LogitTransform
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.padding import Padding
from h2o_stream.errors import H2OStreamError


class EvictingLayer(CacheLayerMixin):
    """Splits queries, keys and values by head group. Keys are stored in `attend`, once their attention is known.

    Args:
        head_groups: together all KV heads of the layer.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, head_groups: Sequence[HeadGroup]) -> None:
        super().__init__()
        self.head_groups = tuple(head_groups)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, transform: LogitTransform, padding: Padding | None = None
    ) -> Tensor:
        """[B, Q, Hq, D]; see `HeadGroup.attend`."""
        if len(self.head_groups) == 1:
            return self.head_groups[0].attend(query, key, value, transform, padding)
        batch, query_heads, new, _ = query.shape
        query = query.unflatten(1, (key.shape[1], -1))
        output = value.new_empty(batch, new, *query.shape[1:3], value.shape[-1], dtype=query.dtype)
        for group in self.head_groups:
            queries = query[:, group.heads].flatten(1, 2)
            attended = group.attend(queries, key[:, group.heads], value[:, group.heads], transform, padding)
            output[:, :, group.heads] = attended.unflatten(2, (group.num_heads, -1))
        return output.view(batch, new, query_heads, -1)

    # transformers' interface

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: `attend` allocates the slots."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Pass the new keys and values through to the attention function."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Columns seen, evicted ones and padding included: what `generate` counts with."""
        return self.head_groups[0].tokens.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of a mask, which nobody uses: `attend` makes its own."""
        return query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def reset(self) -> None:
        """Forget the stream and release the slots."""
        for group in self.head_groups:
            group.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what was evicted for the removed tokens does not come back."""
        raise H2OStreamError("a cache that evicts cannot take tokens back; generate without an assistant model")
