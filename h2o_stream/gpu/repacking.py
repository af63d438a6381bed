"""The blocks of GGUF files as arrays that the kernels in `blocks` load in whole words, with as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_stream.native.gguf_types import BLOCKS, TensorType

_GROUP = 32


class Planes(NamedTuple):
    """Arrays of a matrix, each row after row. See `blocks`.

    Attributes:
        codes: [rows, words] int32.
        high: [rows, lanes] uint8 (codes in 5 bits) or int16 (in 6), or None.
        scales: [rows, n] float16, a number of each group; int32, two of each; of K-quants as in their blocks.
    """

    codes: Tensor
    high: Tensor | None
    scales: Tensor

    def rows(self, part: slice) -> Planes:
        """Some of the rows, in the same memory."""
        return Planes(self.codes[part], None if self.high is None else self.high[part], self.scales[part])


class _Kind(NamedTuple):
    """How the blocks of a type are stored.

    Attributes:
        codes, scales: sizes for each group, in bytes; those of `high` are what is left.
        unpack: from blocks [n, bytes] uint8, the codes [n, groups, 32] and the bytes of their scales [n, ...].
    """

    codes: int
    scales: float
    dtype: torch.dtype
    unpack: Callable[[Tensor], tuple[Tensor, Tensor]]


def _nibbles(packed: Tensor) -> Tensor:
    """[n, k, bytes] to [n, k, 2, bytes]: lower and upper halves."""
    return torch.stack([packed & 15, packed >> 4], 2)


def _bits(packed: Tensor) -> Tensor:
    """[n, bytes] to [n, 8 bytes], 0 or 1."""
    return (packed[:, :, None] >> torch.arange(8, device=packed.device, dtype=torch.uint8) & 1).flatten(1)


def _small(header: int, five: bool = False) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Blocks of 32 codes in 4 or 5 bits, after as many bytes of scales."""

    def unpack(blocks: Tensor) -> tuple[Tensor, Tensor]:
        codes = _nibbles(blocks[:, None, -16:]).view(-1, 1, _GROUP)
        if five:
            codes = codes | _bits(blocks[:, header : header + 4])[:, None] << 4
        return codes, blocks[:, :header]

    return unpack


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return blocks[:, None, 2:] ^ 128, blocks[:, :2]


def _k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of both numbers in 6 bits of a group, 8 bits are in a byte and the last 4 in half of another."""
    codes = _nibbles(blocks[:, -128:].view(-1, 4, _GROUP)).view(-1, 8, _GROUP)
    if blocks.shape[1] == BLOCKS[TensorType.Q5_K][1]:
        codes = codes | _bits(blocks[:, 16:48]).view(-1, _GROUP, 8).transpose(1, 2) << 4
    low, middle, high = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scale = torch.cat([low & 63, high & 15 | low >> 6 << 4], 1)
    minimum = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], 1)
    rest = minimum >> 2
    return codes, torch.cat([blocks[:, :4], scale | minimum << 6, rest[:, ::2] | rest[:, 1::2] << 4], 1)


def _q6_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    low, high = _nibbles(blocks[:, :128].view(-1, 2, 64)), blocks[:, 128:192].view(-1, 2, 1, _GROUP)
    shifts = torch.arange(0, 8, 2, device=blocks.device, dtype=torch.uint8)[:, None]
    return low.view(-1, 8, _GROUP) | ((high >> shifts & 3) << 4).view(-1, 8, _GROUP), blocks[:, 192:]


_KINDS = {
    TensorType.Q4_0: _Kind(16, 2, torch.float16, _small(2)),
    TensorType.Q4_1: _Kind(16, 4, torch.int32, _small(4)),
    TensorType.Q5_0: _Kind(16, 2, torch.float16, _small(2, five=True)),
    TensorType.Q5_1: _Kind(16, 4, torch.int32, _small(4, five=True)),
    TensorType.Q8_0: _Kind(32, 2, torch.float16, _q8_0),
    TensorType.Q4_K: _Kind(16, 2, torch.int32, _k),
    TensorType.Q5_K: _Kind(16, 2, torch.int32, _k),
    TensorType.Q6_K: _Kind(16, 2.25, torch.int16, _q6_k),
}

TYPES = _KINDS.keys()
"""Those that are read here."""


def planes(packed: Tensor, kind: TensorType, rows: int, columns: int) -> Planes:
    """The arrays in packed bytes uint8, one after another: as many bytes as the blocks."""
    groups, (codes, scales, dtype, _) = columns // _GROUP, _KINDS[kind]
    sizes = rows * groups * codes, rows * int(groups * scales)
    first, high, last = packed.split([sizes[0], packed.numel() - sum(sizes), sizes[1]])
    above = high.view(torch.int16 if kind == TensorType.Q6_K else torch.uint8).view(rows, -1) if len(high) else None
    return Planes(first.view(torch.int32).view(rows, -1), above, last.view(dtype).view(rows, -1))


def repack(blocks: Tensor, kind: TensorType, columns: int, into: Planes) -> None:
    """Write rows of blocks [n, bytes] uint8 to as many rows of arrays."""
    rows = len(blocks)
    codes, scales = _KINDS[kind].unpack(blocks.reshape(-1, BLOCKS[kind][1]))
    parts = codes.reshape(rows, columns // _GROUP, 8, 4)
    if kind == TensorType.Q8_0:
        words = parts.view(rows, -1, 2, 4, 4).permute(0, 2, 1, 4, 3)
    else:
        words = (parts[:, :, ::2] & 15 | parts[:, :, 1::2] << 4).transpose(2, 3)
    into.codes.copy_(words.reshape(rows, -1).view(torch.int32))
    into.scales.copy_(scales.reshape(rows, -1).view(into.scales.dtype))
    if into.high is not None:
        bits = 2 if kind == TensorType.Q6_K else 1
        pairs = (parts >> 4).view(rows, -1, bits, 4 // bits, 2, 4)
        fields = pairs.transpose(3, 4).reshape(rows, -1, bits, 8 // bits, 4)
        shifts = torch.arange(0, 8, bits, device=blocks.device, dtype=torch.uint8)[:, None]
        high = (fields << shifts).sum(3, dtype=torch.uint8).transpose(2, 3)
        into.high.copy_(high.reshape(rows, -1).view(into.high.dtype))
