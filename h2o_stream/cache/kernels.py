"""The interface of whatever computes attention and eviction for a head group: `eager` in torch, or native code."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from h2o_stream.cache.attention import LogitTransform, QueryChunk
from h2o_stream.cache.head_group import HeadGroup


class Kernels(Protocol):
    """Everything between new keys and the output of attention.

    `decode` and `prefill` write the tensors of the group in place, `seen` included. They do not count tokens.
    """

    def supports(self, group: HeadGroup, query: Tensor, transform: LogitTransform) -> bool:
        """Whether `decode` and `prefill` support this group, query [B, Hq, Q, D] and transform."""

    def chunk_size(self, group: HeadGroup, new: int) -> int:
        """How many of the new tokens `prefill` takes at once: a chunk, or several, evicting after each."""

    def decode(self, group: HeadGroup, chunk: QueryChunk) -> Tensor:
        """Store one token of each row, attend, update the scores, and evict until a slot is free again.

        Returns:
            [B, 1, Hq, D] in the query's dtype.
        """

    def prefill(self, group: HeadGroup, chunk: QueryChunk) -> Tensor:
        """Attend to the cached tokens and to the new ones, then keep the best of both. Sets `group.filled`.

        Returns:
            [B, Q, Hq, D] in the query's dtype; undefined where there is padding.
        """
