"""Where the keys and values of a layer's slots lie: as they are, or quantized but for a few tokens."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from h2o_stream.cache.quantize import decode, encode, fit, spread
from h2o_stream.errors import ConfigError


class Store:
    """Keys and values [B, Hkv, S, D] in the model's dtype."""

    sinks = residual = exact = 0
    names: tuple[str, ...] = ("keys", "values")
    """The tensors, rows first, that are all there is to keep."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.slots = keys.shape[2]

    @classmethod
    def empty(cls, key: Tensor, value: Tensor, slots: int) -> Self:
        """So many slots for keys and values like those of a token [B, Hkv, 1, D]."""
        keys, values = (x.new_zeros(*x.shape[:2], slots, x.shape[-1]) for x in (key, value))
        return cls(keys, values)

    def read(self) -> tuple[Tensor, Tensor]:
        """All keys and values, for a decode step."""
        return self.keys, self.values

    def read_exactly(self, used: int) -> tuple[Tensor, Tensor]:
        """At least the first `used` slots, in a dtype from which `hold` stores them as they were."""
        return self.keys[:, :, :used], self.values[:, :, :used]

    def write(self, slot: Tensor, key: Tensor, value: Tensor) -> None:
        """Put one token [B, Hkv, 1, D] into slot [B, Hkv, 1]."""
        rows, heads = (torch.arange(n, device=slot.device) for n in slot.shape[:2])
        place = (rows[:, None], heads, slot[..., 0])
        self.keys.index_put_(place, key[:, :, 0])
        self.values.index_put_(place, value[:, :, 0])

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Replace everything by the tokens of a prefill, [B, Hkv, n, D] each, in the first n slots."""
        for slots, x in ((self.keys, keys), (self.values, values)):
            slots[:, :, : x.shape[2]] = x
            slots[:, :, x.shape[2] :] = 0

    def rearrange(self, order: Tensor, slots: int) -> None:
        """Move to an allocation of so many slots: first what lies at `order` [B, Hkv, n] now, then nothing."""
        self.keys, self.values, self.slots = _moved(self.keys, order, slots), _moved(self.values, order, slots), slots


class QuantizedStore:
    """Sinks and the newest tokens as they are, all others in a few bits: keys per channel, values per token.

    The first slots are the sinks', then comes a ring of the newest tokens, by token index, in which the seat of the
    next one is free. Both are protected from eviction. A token that falls out of the ring is encoded and moves to a
    slot of the rest, where it stays until it is evicted.

    The grid of a key channel covers what its head has held since the start; it is shared by all encoded tokens, which
    are moved to a wider one when a key comes that lies outside. (KIVI, arXiv 2402.02750, and MiniKV, arXiv 2411.18077,
    give groups of consecutive tokens grids of their own; such groups do not last where single tokens are evicted.) A
    token's values share a grid of their own in each head.
    """

    names = ("keys", "values", "key_codes", "value_codes", "key_range", "value_grid")

    def __init__(self, key: Tensor, value: Tensor, slots: int, bits: int, sinks: int, residual: int) -> None:
        for size in (key.shape[-1], value.shape[-1]):
            if size * bits % 8:
                raise ConfigError(f"kv_bits is {bits}, but heads of size {size} do not fill bytes; raise --kv-bits")
        self.slots, self.bits, self.sinks, self.residual = slots, bits, sinks, residual
        self.exact = sinks + residual
        rows, device, encoded = key.shape[:2], key.device, slots - self.exact
        self.keys = key.new_zeros(*rows, self.exact, key.shape[-1])
        self.values = value.new_zeros(*rows, self.exact, value.shape[-1])
        self.key_codes = torch.zeros(*rows, encoded, key.shape[-1] * bits // 8, dtype=torch.uint8, device=device)
        self.value_codes = torch.zeros(*rows, encoded, value.shape[-1] * bits // 8, dtype=torch.uint8, device=device)
        self.key_range = torch.full((*rows, 2, key.shape[-1]), torch.inf, dtype=torch.float32, device=device)
        self.key_range[:, :, 1] = -torch.inf
        self.value_grid = torch.zeros(*rows, encoded, 2, dtype=torch.float16, device=device)

    def read(self) -> tuple[Tensor, Tensor]:
        """All keys and values, for a decode step."""
        return self._read(self.keys.dtype)

    def read_exactly(self, used: int) -> tuple[Tensor, Tensor]:
        """All slots in float32: encoding them again gives the same codes."""
        return self._read(torch.float32)

    def write(self, slot: Tensor, key: Tensor, value: Tensor) -> None:
        """Put one token [B, Hkv, 1, D] into slot [B, Hkv, 1], which is the sinks' or in the ring."""
        self.keys.scatter_(2, _wide(slot, key), key)
        self.values.scatter_(2, _wide(slot, value), value)

    def demote(self, ring: Tensor, slot: Tensor, there: Tensor) -> None:
        """Encode the token at `ring` and put it into `slot`, both [B, Hkv, 1].

        Args:
            ring: where the token is.
            slot: where it goes, after the ring.
            there: [B, Hkv, S] bool, slots that hold a token.
        """
        before = self.key_range.clone()
        self._widen(self.keys[:, :, self.sinks :], there[..., self.sinks : self.exact])
        if not self.key_range.equal(before):
            keys = decode(self.key_codes, _spread(before, self.bits), self.bits, torch.float32)
            self.key_codes.copy_(encode(keys, self._key_grid(), self.bits))
        keys, values = (x.gather(2, _wide(ring, x)).float() for x in (self.keys, self.values))
        codes, grid = encode(keys, self._key_grid(), self.bits), fit(values, self.bits).half()
        self.key_codes.scatter_(2, _wide(slot - self.exact, codes), codes)
        codes = encode(values, grid, self.bits)
        self.value_codes.scatter_(2, _wide(slot - self.exact, codes), codes)
        stored = torch.cat(tuple(grid), -1)
        self.value_grid.scatter_(2, _wide(slot - self.exact, stored), stored)

    def hold(self, slot: Tensor, keys: Tensor, values: Tensor) -> None:
        """Replace everything by the tokens of a prefill.

        Args:
            slot: [B, Hkv, n] int64, where each goes, S for a place without a token; no other slot twice.
            keys: [B, Hkv, n, D].
            values: [B, Hkv, n, D].
        """
        keys, values = _placed(slot, keys.float(), self.slots), _placed(slot, values.float(), self.slots)
        there = _placed(slot, torch.ones_like(slot, dtype=torch.bool)[..., None], self.slots)[..., 0]
        self.keys.copy_(keys[:, :, : self.exact])
        self.values.copy_(values[:, :, : self.exact])
        self._widen(keys[:, :, self.sinks :], there[..., self.sinks :])
        keys, values = keys[:, :, self.exact :], values[:, :, self.exact :]
        grid = fit(values, self.bits).half()
        self.key_codes.copy_(encode(keys, self._key_grid(), self.bits))
        self.value_codes.copy_(encode(values, grid, self.bits))
        torch.cat(tuple(grid), -1, out=self.value_grid)

    def rearrange(self, order: Tensor, slots: int) -> None:
        """Move to an allocation of so many slots: behind sinks and ring first what lies at `order` [B, Hkv, n] there.

        Nothing is encoded anew.
        """
        for name in ("key_codes", "value_codes", "value_grid"):
            setattr(self, name, _moved(getattr(self, name), order, slots - self.exact))
        self.slots = slots

    def _read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys = decode(self.key_codes, self._key_grid(), self.bits, dtype)
        values = decode(self.value_codes, self.value_grid.unsqueeze(-2).movedim(-1, 0), self.bits, dtype)
        return torch.cat((self.keys.to(dtype), keys), 2), torch.cat((self.values.to(dtype), values), 2)

    def _key_grid(self) -> Tensor:
        return _spread(self.key_range, self.bits)

    def _widen(self, keys: Tensor, there: Tensor) -> None:
        """Make room on the key grids for keys [B, Hkv, n, D], where `there` [B, Hkv, n] says there are any."""
        low = keys.float().masked_fill(~there[..., None], torch.inf).amin(2)
        high = keys.float().masked_fill(~there[..., None], -torch.inf).amax(2)
        least, most = self.key_range.unbind(2)
        self.key_range.copy_(torch.stack((torch.minimum(least, low), torch.maximum(most, high)), dim=2))


def _wide(slot: Tensor, x: Tensor) -> Tensor:
    """[B, Hkv, n] slots for the last dimension of x [B, Hkv, n, D]."""
    return slot[..., None].expand(-1, -1, -1, x.shape[-1])


def _moved(x: Tensor, order: Tensor, slots: int) -> Tensor:
    """Rows `order` [B, Hkv, n] of x [B, Hkv, S, D], and zeros up to `slots`."""
    return pad(x.gather(2, _wide(order, x)), (0, 0, 0, slots - order.shape[-1]))


def _placed(slot: Tensor, x: Tensor, slots: int) -> Tensor:
    """Numbers x [B, Hkv, n, D] in their slots, of `slots` in all, zero where there is none; slot `slots` is dropped."""
    return x.new_zeros(*x.shape[:2], slots + 1, x.shape[-1]).scatter_(2, _wide(slot, x), x)[:, :, :slots].contiguous()


def _spread(key_range: Tensor, bits: int) -> Tensor:
    """The grid [2, B, Hkv, 1, D] of the range [B, Hkv, 2, D]."""
    low, high = key_range.unsqueeze(3).unbind(2)
    return spread(low, high, bits)
