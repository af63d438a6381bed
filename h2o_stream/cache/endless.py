"""What every layer of ours tells transformers: it does as it is told about keys, makes its own masks, has no limit."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class EndlessLayer(CacheLayerMixin):
    """A layer whose `attend` stores keys and values once their attention is known."""

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand the new keys and values on to the attention function."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of a mask; ours are made in `attend`."""
        return query_length, 0

    def get_max_length(self) -> int:
        """No limit: the stream is endless."""
        return -1
