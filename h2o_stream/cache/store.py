"""Where the keys and values of a layer's slots lie: as they are, or quantized but for the newest tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from h2o_stream.cache.quantize import decode, encode, fit
from h2o_stream.errors import ConfigError


class Store:
    """Keys and values [B, Hkv, S, D] in the model's dtype."""

    residual = 0
    """Leading slots that hold the newest tokens; see `QuantizedStore`."""

    names: tuple[str, ...] = ("keys", "values")
    """The tensors, rows first, that are all there is to keep."""

    def __init__(self, key: Tensor, value: Tensor, slots: int) -> None:
        self.keys = key.new_zeros(*key.shape[:2], slots, key.shape[-1])
        self.values = value.new_zeros(*value.shape[:2], slots, value.shape[-1])

    def read(self) -> tuple[Tensor, Tensor]:
        """All keys and values, for a decode step."""
        return self.keys, self.values

    def read_exactly(self, used: int) -> tuple[Tensor, Tensor]:
        """The first `used` slots, in a dtype from which `hold` stores them as they were."""
        return self.keys[:, :, :used], self.values[:, :, :used]

    def write(self, slot: Tensor, key: Tensor, value: Tensor) -> None:
        """Put one token [B, Hkv, 1, D] into slot [B, Hkv, 1]."""
        self.keys.scatter_(2, _wide(slot, key), key)
        self.values.scatter_(2, _wide(slot, value), value)

    def hold(self, slot: Tensor, keys: Tensor, values: Tensor, there: Tensor, due: Sequence[bool]) -> None:
        """Replace everything by the tokens of a prefill.

        Args:
            slot: [B, Hkv, n] int64, where each goes, oldest token first; no slot twice.
            keys: [B, Hkv, n, D].
            values: [B, Hkv, n, D].
            there: [B, Hkv, n] bool, False where there is no token.
            due: rows whose stream has doubled since the last call; see `doubled`.
        """
        self.keys.scatter_(2, _wide(slot, keys), keys)
        self.values.scatter_(2, _wide(slot, values), values)


class QuantizedStore:
    """The newest tokens as they are, all others in a few bits: keys per channel, values per token.

    Slots 0 to residual - 1 are a ring of the newest tokens, by token index. A token that falls out of it is encoded
    and moves to a slot of the rest, where it stays until it is evicted. A grid of a key channel is shared by all
    encoded tokens of a head; it is fitted anew each time the stream has doubled. (KIVI, arXiv 2402.02750, and MiniKV,
    arXiv 2411.18077, give groups of consecutive tokens grids of their own; where single tokens are evicted such groups
    do not last.)
    """

    names = ("keys", "values", "key_codes", "value_codes", "key_grid", "value_grid")

    def __init__(self, key: Tensor, value: Tensor, slots: int, bits: int, residual: int) -> None:
        for size in (key.shape[-1], value.shape[-1]):
            if size * bits % 8:
                raise ConfigError(f"kv_bits is {bits}, but heads of size {size} do not fill bytes; raise --kv-bits")
        self.bits, self.residual = bits, residual
        encoded = slots - residual
        rows, sizes = key.shape[:2], (key.shape[-1], value.shape[-1])
        self.keys = key.new_zeros(*rows, residual, sizes[0])
        self.values = value.new_zeros(*rows, residual, sizes[1])
        codes = [torch.zeros(*rows, encoded, size * bits // 8, dtype=torch.uint8, device=key.device) for size in sizes]
        self.key_codes, self.value_codes = codes
        self.key_grid = torch.zeros(*rows, 1, sizes[0], 2, dtype=torch.float32, device=key.device)
        self.value_grid = torch.zeros(*rows, encoded, 1, 2, dtype=torch.float16, device=key.device)

    def read(self) -> tuple[Tensor, Tensor]:
        """All keys and values, for a decode step."""
        return self._read(self.keys.dtype)

    def read_exactly(self, used: int) -> tuple[Tensor, Tensor]:
        """The first `used` slots in float32: encoding them again gives the same codes."""
        keys, values = self._read(torch.float32)
        return keys[:, :, :used], values[:, :, :used]

    def _read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys = decode(self.key_codes, _grid(self.key_grid), self.bits, dtype)
        values = decode(self.value_codes, _grid(self.value_grid), self.bits, dtype)
        return torch.cat((self.keys.to(dtype), keys), 2), torch.cat((self.values.to(dtype), values), 2)

    def write(self, slot: Tensor, key: Tensor, value: Tensor) -> None:
        """Put one token [B, Hkv, 1, D] into the ring, at slot [B, Hkv, 1]."""
        self.keys.scatter_(2, _wide(slot, key), key)
        self.values.scatter_(2, _wide(slot, value), value)

    def demote(self, ring: Tensor, slot: Tensor, there: Tensor, due: Sequence[bool]) -> None:
        """Encode the token at `ring` and put it into `slot`, both [B, Hkv, 1].

        Args:
            ring: where the token is.
            slot: where it goes, outside the ring.
            there: [B, Hkv, S] bool, slots that hold a token.
            due: see `Store.hold`.
        """
        if any(due):
            keys, _ = self._read(torch.float32)
            self._refit(keys, there, due)
            self.key_codes = encode(keys[:, :, self.residual :], _grid(self.key_grid), self.bits)
        key = self.keys.gather(2, _wide(ring, self.keys))
        value = self.values.gather(2, _wide(ring, self.values))
        self._encode(slot - self.residual, key, value)

    def hold(self, slot: Tensor, keys: Tensor, values: Tensor, there: Tensor, due: Sequence[bool]) -> None:
        """Replace everything by the tokens of a prefill, the last of them go to the ring; see `Store.hold`."""
        old = max(slot.shape[-1] - self.residual, 0)
        ring = slot[..., old:]
        self.keys.scatter_(2, _wide(ring, keys), keys[:, :, old:].to(self.keys.dtype))
        self.values.scatter_(2, _wide(ring, values), values[:, :, old:].to(self.values.dtype))
        if any(due):
            self._refit(keys, there, due)
        self._encode(slot[..., :old] - self.residual, keys[:, :, :old], values[:, :, :old])

    def _refit(self, keys: Tensor, there: Tensor, due: Sequence[bool]) -> None:
        fitted = fit(keys, self.bits, 2, there[..., None]).permute(1, 2, 3, 4, 0)
        rows = torch.tensor(due, device=keys.device).view(-1, 1, 1, 1, 1)
        self.key_grid = torch.where(rows, fitted, self.key_grid)

    def _encode(self, slot: Tensor, keys: Tensor, values: Tensor) -> None:
        grid = fit(values, self.bits, 3).half()
        codes = encode(keys, _grid(self.key_grid), self.bits), encode(values, grid, self.bits)
        self.key_codes.scatter_(2, _wide(slot, codes[0]), codes[0])
        self.value_codes.scatter_(2, _wide(slot, codes[1]), codes[1])
        stored = grid.permute(1, 2, 3, 4, 0)
        self.value_grid.scatter_(2, slot[..., None, None].expand(stored.shape), stored)


def _wide(slot: Tensor, x: Tensor) -> Tensor:
    """[B, Hkv, n] slots for the last dimension of x [B, Hkv, n, D]."""
    return slot[..., None].expand(-1, -1, -1, x.shape[-1])


def _grid(stored: Tensor) -> Tensor:
    """A stored grid [B, Hkv, n, D, 2], rows first, as the functions of `quantize` take it."""
    return stored.movedim(-1, 0)


def doubled(before: Sequence[int], after: Sequence[int], residual: int) -> list[bool]:
    """Which rows have passed the residual, or twice, four times, ... its size, as they grew."""
    return [_doublings(b, residual) < _doublings(a, residual) for b, a in zip(before, after, strict=True)]


def _doublings(length: int, residual: int) -> int:
    return (max(length - 1, 0) // residual).bit_length() if residual else 0
