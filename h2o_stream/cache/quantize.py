"""Numbers on a grid of a few bits. Pure functions of tensors.

A grid is an offset and a step; a code is a whole number from 0 to 2**bits - 1 and stands for offset + code * step. Bits
are 2, 4, 6 or 8, numbers float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

_COVERS = {8: 1.0, 6: 1.0, 4: 1.0, 2: 0.57}
"""Fraction of a range that a grid covers: with four levels it pays to clip outliers."""

_PLANES = {8: (8,), 6: (4, 2), 4: (4,), 2: (2,)}
"""Bits of the planes that hold codes of so many bits, from the lowest. Planes of 6 bits would not fill bytes evenly."""

_TRIED = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)


def spread(low: Tensor, high: Tensor, bits: int, covers: float | None = None) -> Tensor:
    """The grid of ranges, [2, *low.shape]: offsets, then steps. An empty range, `low` above `high`, gives zeros.

    It spans `covers` of a range, around its middle; None for the default of these bits.
    """
    half = (high - low).clamp_min(0) / 2 * (_COVERS[bits] if covers is None else covers)
    middle = torch.where(low <= high, (low + high) / 2, 0.0)
    half = torch.where(low <= high, half, 0.0)
    return torch.stack((middle - half, half * 2 / (2**bits - 1)))


def fit(x: Tensor, bits: int) -> Tensor:
    """The grid of least squared error for each row, among several that cover a fraction of its range.

    Numbers [..., n] that are on such a grid [2, ..., 1] already get the same grid again.
    """
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    best = spread(low, high, bits, 1.0)
    best_error = _error(x, best, bits)
    for covers in _TRIED[1:] if bits <= 4 else ():
        grid = spread(low, high, bits, covers)
        error = _error(x, grid, bits)
        best = torch.where(error < best_error, grid, best)
        best_error = torch.minimum(error, best_error)
    return best


def _error(x: Tensor, grid: Tensor, bits: int) -> Tensor:
    offset, step = grid.unbind(0)
    return (levels(x, grid, bits) * step + offset - x).square().sum(-1, keepdim=True)


def levels(x: Tensor, grid: Tensor, bits: int) -> Tensor:
    """The nearest level of each number, from 0 to 2**bits - 1, on a grid [2, ...] that is broadcast over them."""
    offset, step = grid.float().unbind(0)
    return (x - offset).div_(step.clamp_min(torch.finfo(torch.float32).tiny)).round_().clamp_(0, 2**bits - 1)


def encode(x: Tensor, grid: Tensor, bits: int) -> Tensor:
    """[..., D] float32 to [..., D * bits / 8] uint8 codes on a grid [2, ...]; D * bits is a multiple of 8.

    A row is one plane, or for 6 bits two: the lower four bits of all codes, then the upper two. A byte of a plane holds
    bits of codes that lie D * width / 8 apart, so that decoding is a concatenation.
    """
    codes, planes, shift = levels(x, grid, bits).to(torch.uint8), [], 0
    for width in _PLANES[bits]:
        first, *others = ((codes >> shift) & (2**width - 1)).chunk(8 // width, dim=-1)
        for number, other in enumerate(others, start=1):
            first = first | (other << (width * number))
        planes.append(first)
        shift += width
    return torch.cat(planes, dim=-1)


def decode(codes: Tensor, grid: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `encode`, in `dtype`."""
    size, shift, total = codes.shape[-1] * 8 // bits, 0, None
    for plane, width in zip(
        codes.split([size * width // 8 for width in _PLANES[bits]], -1), _PLANES[bits], strict=True
    ):
        parts = [(plane >> low) & (2**width - 1) for low in range(0, 8, width)]
        level = torch.cat(parts, dim=-1) << shift
        total = level if total is None else total | level
        shift += width
    assert total is not None
    offset, step = grid.to(dtype).unbind(0)
    return torch.addcmul(offset, total.to(dtype), step)
