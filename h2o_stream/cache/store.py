"""Where a head group puts keys and values: in the model's dtype here, in a few bits in `quantized_store`.

A policy says what a token is worth, a head group keeps scores, token indices and ranks. A store says which slot a new
token takes and what moves to make room for it. It knows neither scores nor windows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Store:
    """Keys and values [B, Hkv, S, D] in the model's dtype, and the interface of every store.

    Args:
        tensors: see `Slots.layout`; they are written in place.

    Attributes:
        exact: slots before the first one that eviction may free, those of tokens in full precision.
    """

    exact = 0

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.keys, self.values = tensors["keys"], tensors["values"]
        self.slots = tensors["index"].shape[-1]

    def read(self) -> tuple[Tensor, Tensor]:
        """All keys and values, for a decode step."""
        return self.keys, self.values

    def read_exactly(self, filled: int) -> tuple[Tensor, Tensor]:
        """At least the first `filled` slots, in a dtype that `place_prefill` stores without loss."""
        return self.keys[:, :, :filled], self.values[:, :, :filled]

    def next_slot(self, seen: Tensor, free: Tensor) -> Tensor:
        """The slot [B, Hkv, 1] of the next token.

        Args:
            seen: [B, 1, 1] int64, tokens of each row so far.
            free: [B, Hkv, 1] int64, an empty slot.
        """
        return free

    def write(self, slot: Tensor, key: Tensor, value: Tensor) -> None:
        """Put one token [B, Hkv, 1, D] into the slot [B, Hkv, 1] that `next_slot` gave."""
        rows, heads = (torch.arange(n, device=slot.device) for n in slot.shape[:2])
        where = (rows[:, None], heads, slot[..., 0])
        self.keys.index_put_(where, key[:, :, 0])
        self.values.index_put_(where, value[:, :, 0])

    def displace(self, seen: Tensor, free: Tensor, index: Tensor) -> Tensor | None:
        """Move the token that is in the way of the next one to the slot `free`.

        Args:
            seen: [B, 1, 1] int64, tokens of each row so far.
            free: [B, Hkv, 1] int64, an empty slot.
            index: [B, Hkv, S], negative where a slot is empty.

        Returns:
            The slot [B, Hkv, 1] that it left; None if every new token takes the free slot, so that nothing moves.
        """
        return None

    def place_prefill(self, keys: Tensor, values: Tensor, index: Tensor, seen: Tensor) -> tuple[Tensor, int]:
        """Replace everything by n tokens, oldest first.

        Args:
            keys: [B, Hkv, n, D].
            values: [B, Hkv, n, D].
            index: [B, Hkv, n] token indices, -1 where a row has fewer tokens.
            seen: [B, 1, 1] int64, tokens of each row so far.

        Returns:
            The slot [B, Hkv, n] int64 of each token, S where there is none; and the first free slot.
        """
        n = keys.shape[2]
        for slots, x in ((self.keys, keys), (self.values, values)):
            slots[:, :, :n] = x
            slots[:, :, n:] = 0
        return torch.arange(n, device=index.device).where(index >= 0, self.slots), n


def wide(slot: Tensor, x: Tensor) -> Tensor:
    """Slots [B, Hkv, n], expanded over the last dimension of x [B, Hkv, n, D]."""
    return slot[..., None].expand(-1, -1, -1, x.shape[-1])
