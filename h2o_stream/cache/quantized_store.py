"""Keys and values in a few bits, except for the first and the newest tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from h2o_stream.cache.quantize import decode, encode, fit, spread
from h2o_stream.cache.store import Store, wide

MARGIN = 0.1
"""Part of its range by which a grid is widened beyond a key that lies outside: few keys do then, and each time adds a
rounding error to all that are stored."""

SLACK = 2.0**-16
"""Part of its range by which a key may lie outside a grid: those that are stored already do, by rounding."""


class QuantizedStore(Store):
    """Sinks and the newest tokens in the model's dtype, all others in a few bits: keys per channel, values per token.

    The first slots belong to the sinks. Then comes a ring of the newest tokens, ordered by token index, in which the
    slot of the next token is empty. Neither can be evicted. A token that leaves the ring is encoded and moves to one
    of the remaining slots, where it stays until it is evicted.

    The grid of a key channel covers everything its head has stored since the start. All encoded tokens share it; when
    a key lies outside, they are re-encoded on a wider grid. (KIVI, arXiv 2402.02750, and MiniKV, arXiv 2411.18077,
    give each group of consecutive tokens its own grid; such groups do not survive the eviction of single tokens.) The
    values of a token share one grid per head.

    Args:
        tensors: see `Store`. Keys and values are those of sinks and ring; ``key_codes`` and ``value_codes`` those of
            the other slots, ``key_range`` the minimum and maximum of each key channel, ``value_grid`` the offset and
            step of the values of each slot.
        sinks: first tokens that have slots of their own.
    """

    def __init__(self, tensors: Mapping[str, Tensor], bits: int, sinks: int) -> None:
        super().__init__(tensors)
        names = "key_codes", "value_codes", "key_range", "value_grid"
        self.key_codes, self.value_codes, self.key_range, self.value_grid = (tensors[name] for name in names)
        self.bits, self.sinks, self.exact = bits, sinks, self.keys.shape[2]
        self.residual = self.exact - sinks

    def read(self) -> tuple[Tensor, Tensor]:
        """All keys and values, for a decode step."""
        return self._decoded(self.keys.dtype)

    def read_exactly(self, filled: int) -> tuple[Tensor, Tensor]:
        """All slots in float32: encoding them again gives the same codes."""
        return self._decoded(torch.float32)

    def next_slot(self, seen: Tensor, free: Tensor) -> Tensor:
        """A slot of the sinks or of the ring; see `Store.next_slot`."""
        return self._exact_slot(seen).expand_as(free)

    def write(self, slot: Tensor, key: Tensor, value: Tensor) -> None:
        """Put one token [B, Hkv, 1, D] into the slot [B, Hkv, 1] that `next_slot` gave."""
        self.keys.scatter_(2, wide(slot, key), key)
        self.values.scatter_(2, wide(slot, value), value)

    def displace(self, seen: Tensor, free: Tensor, index: Tensor) -> Tensor:
        """Encode the oldest token of the ring and move it to `free`; see `Store.displace`."""
        slot = self.next_slot(seen, free)
        before = self.key_range.clone()
        self._widen(self.keys[:, :, self.sinks :], index[..., self.sinks : self.exact] >= 0)
        if self._on_gpu or not self.key_range.equal(before):  # which a captured step cannot read
            keys = decode(self.key_codes, _key_grid(before, self.bits), self.bits, torch.float32)
            self.key_codes.copy_(encode(keys, self._grid, self.bits))
        keys, values = (x.gather(2, wide(slot, x)).float() for x in (self.keys, self.values))
        grid = fit(values, self.bits).half()
        encoded = (
            (self.key_codes, encode(keys, self._grid, self.bits)),
            (self.value_codes, encode(values, grid, self.bits)),
            (self.value_grid, torch.cat(tuple(grid), -1)),
        )
        for stored, x in encoded:
            stored.scatter_(2, wide(free - self.exact, x), x)
        return slot

    def place_prefill(self, keys: Tensor, values: Tensor, index: Tensor, seen: Tensor) -> tuple[Tensor, int]:
        """Replace everything by n tokens, oldest first."""
        n, ring = keys.shape[2], self.residual - 1
        order = torch.arange(n, device=index.device)
        slot = torch.where(order < n - ring, self.exact - self.sinks + order, self._exact_slot(seen - n + order))
        slot = torch.where(index < self.sinks, index, slot).masked_fill(index < 0, self.slots)
        keys, values = _placed(slot, keys.float(), self.slots), _placed(slot, values.float(), self.slots)
        is_token = _placed(slot, torch.ones_like(slot, dtype=torch.bool)[..., None], self.slots)[..., 0]
        self.keys.copy_(keys[:, :, : self.exact])
        self.values.copy_(values[:, :, : self.exact])
        self._widen(keys[:, :, self.sinks :], is_token[..., self.sinks :])
        keys, values = keys[:, :, self.exact :], values[:, :, self.exact :]
        grid = fit(values, self.bits).half()
        self.key_codes.copy_(encode(keys, self._grid, self.bits))
        self.value_codes.copy_(encode(values, grid, self.bits))
        torch.cat(tuple(grid), -1, out=self.value_grid)
        return slot, max(n + 1, self.exact)

    def _exact_slot(self, index: Tensor) -> Tensor:
        """The slot of a token among the first or the newest, by its index."""
        ring = self.sinks + (index - self.sinks) % self.residual
        return torch.where((index >= 0) & (index < self.sinks), index, ring)

    def _decoded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys = decode(self.key_codes, self._grid, self.bits, dtype)
        values = decode(self.value_codes, self.value_grid.unsqueeze(-2).movedim(-1, 0), self.bits, dtype)
        return torch.cat((self.keys.to(dtype), keys), 2), torch.cat((self.values.to(dtype), values), 2)

    @property
    def _on_gpu(self) -> bool:
        return self.keys.is_cuda

    @property
    def _grid(self) -> Tensor:
        return _key_grid(self.key_range, self.bits)

    def _widen(self, keys: Tensor, is_token: Tensor) -> None:
        """Extend the key grids to cover keys [B, Hkv, n, D], except where `is_token` [B, Hkv, n] is False."""
        low = keys.float().masked_fill(~is_token[..., None], torch.inf).amin(2)
        high = keys.float().masked_fill(~is_token[..., None], -torch.inf).amax(2)
        minimum, maximum = self.key_range.unbind(2)
        slack = (maximum - minimum) * SLACK
        margin = (torch.maximum(maximum, high) - torch.minimum(minimum, low)) * MARGIN
        widened = torch.where(low >= minimum - slack, minimum, low - margin)  # NaN if it is NaN
        maximum = torch.where(high <= maximum + slack, maximum, high + margin)
        self.key_range.copy_(torch.stack((widened, maximum), dim=2))


def _placed(slot: Tensor, x: Tensor, slots: int) -> Tensor:
    """Numbers x [B, Hkv, n, D] in their slots, zero in all others; slot number `slots` is dropped."""
    return x.new_zeros(*x.shape[:2], slots + 1, x.shape[-1]).scatter_(2, wide(slot, x), x)[:, :, :slots].contiguous()


def _key_grid(key_range: Tensor, bits: int) -> Tensor:
    """The grid [2, B, Hkv, 1, D] of the range [B, Hkv, 2, D]."""
    low, high = key_range.unsqueeze(3).unbind(2)
    return spread(low, high, bits)
