"""Padding in a batch: rows are packed to the left before they are split into chunks.

Chunks then start at the first token of each row, so that tokens are evicted as they would be in a batch of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_stream.errors import ConfigError


@dataclass(frozen=True)
class Padding:
    """How the Q columns of one forward are packed.

    Attributes:
        order: [B, Q] int64, the columns of a row, its tokens first and in their order, then its padding.
    """

    order: Tensor
    counts: tuple[int, ...]

    @classmethod
    def of(cls, mask: Tensor | None, batch: int, new: int) -> Padding | None:
        """The padding among the newest `new` columns of a mask, or None if there is none.

        Args:
            mask: [B, T], zero where a token is padding; T counts all columns since the start of the stream, or
                those of this forward only. None hides nothing.
            batch: B.
            new: Q.

        Raises:
            ConfigError: the mask is not a mask of padding.
        """
        if mask is None:
            return None
        if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] < new:
            raise ConfigError(
                f"attention_mask has shape {tuple(mask.shape)}; "
                f"masks of padding are served, [{batch}, at least {new}], zero where there is none"
            )
        kept = mask[:, -new:].bool()
        if bool(kept.all()):
            return None
        counts = tuple(kept.sum(1).tolist())
        if not any(counts):
            raise ConfigError(f"attention_mask hides every token of a forward of {new}; leave it out or show some")
        return cls((~kept).long().argsort(dim=1, stable=True), counts)

    @property
    def has_holes(self) -> bool:
        """Whether some row has padding between its tokens."""
        return any(
            order[count - 1] - order[0] >= count
            for order, count in zip(self.order.tolist(), self.counts, strict=True)
            if count
        )

    @property
    def leads(self) -> bool:
        """Whether all padding comes before the tokens of its row."""
        columns = self.order.shape[1]
        return all(
            first == columns - count
            for first, count in zip(self.order[:, 0].tolist(), self.counts, strict=True)
            if count
        )

    def pack(self, x: Tensor) -> Tensor:
        """[B, H, Q, D] to [B, H, longest row, D]: every row starts with its first token."""
        order = self.order.to(x.device)[:, : max(self.counts)]
        return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))

    def unpack(self, x: Tensor) -> Tensor:
        """[B, longest row, H, D] back to [B, Q, H, D]; undefined where there is padding."""
        full = x.new_zeros(x.shape[0], self.order.shape[1], *x.shape[2:])
        order = self.order.to(x.device)[:, : x.shape[1]]
        return full.scatter_(1, order[:, :, None, None].expand(x.shape), x)

    def hidden(self, device: torch.device) -> Tensor:
        """[B, Q] bool, which columns are padding."""
        order, counts = self.order.to(device), torch.tensor(self.counts, device=device)[:, None]
        beyond = torch.arange(order.shape[1], device=device) >= counts
        return torch.zeros_like(beyond).scatter_(1, order, beyond)

    def chunk(self, start: int, size: int) -> tuple[int, ...]:
        """Number of tokens of each row in the packed columns from `start` to `start + size`."""
        return tuple(min(max(count - start, 0), size) for count in self.counts)

    def positions(self, seen: Tensor) -> Tensor:
        """[B, Q] int64 position of every column in its row's own stream, 0 for padding."""
        order = self.order.to(seen.device)
        counts = torch.tensor(self.counts, device=seen.device)[:, None]
        column = torch.arange(order.shape[1], device=seen.device)
        packed = torch.where(column < counts, seen[:, None] + column, 0)
        return torch.zeros_like(order).scatter_(1, order, packed)
