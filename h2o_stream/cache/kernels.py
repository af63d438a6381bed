"""The interface of whatever computes attention and eviction for a head group: `eager` in torch, or native code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from h2o_stream.cache.attention import LogitTransform
from h2o_stream.cache.budgets import Schedule

if TYPE_CHECKING:
    from h2o_stream.cache.head_group import HeadGroup


class NewTokens(NamedTuple):
    """A chunk of new tokens for a head group.

    Attributes:
        query: [B, Hq, Q, D], un-rotated like the keys (already rotated with ``absolute``).
        key: [B, Hkv, Q, D].
        value: [B, Hkv, Q, D].
        transform: what the model does with query times key.
        lengths: number of earlier tokens of each row.
        counts: number of new tokens of each row; the columns after them are padding.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    transform: LogitTransform
    lengths: Sequence[int]
    counts: Sequence[int]

    def limits(self, schedule: Schedule) -> list[int]:
        """Number of tokens that each row holds after this chunk."""
        return [schedule.held(length + count) for length, count in zip(self.lengths, self.counts, strict=True)]

    def evictions(self, schedule: Schedule) -> list[int]:
        """Number of tokens that one new token evicts, for each row."""
        return [schedule.num_evictions(length) for length in self.lengths]


class Kernels(Protocol):
    """Everything between new keys and the output of attention.

    `decode` and `prefill` write the tensors of the group in place, `seen` included. They do not count tokens.
    """

    def serves(self, group: HeadGroup, query: Tensor) -> bool:
        """Whether `decode` and `prefill` support this group and query [B, Hq, Q, D]."""

    def decode(self, group: HeadGroup, new: NewTokens) -> Tensor:
        """Store one token of each row, attend, update the scores, and evict until a slot is free again.

        Returns:
            [B, 1, Hq, D] in the query's dtype.
        """

    def prefill(self, group: HeadGroup, new: NewTokens) -> Tensor:
        """Attend to the cached tokens and to a chunk of new ones, then keep the best of both. Sets `group.filled`.

        Returns:
            [B, Q, Hq, D] in the query's dtype; undefined where there is padding.
        """
