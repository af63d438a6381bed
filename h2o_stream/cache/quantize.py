"""Numbers on a grid of a few bits. Pure functions of tensors.

A grid is an offset and a step; a code is a whole number from 0 to 2**bits - 1 and stands for offset + code * step.
"""

from __future__ import annotations

import torch
from torch import Tensor

_COVERS = {8: 1.0, 4: 1.0, 2: 0.65}
"""Fraction of a range that a grid covers: with four levels it pays to clip outliers."""

_TRIED = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)


def spread(low: Tensor, high: Tensor, bits: int, covers: float | None = None) -> Tensor:
    """The grid of a range, [2, *low.shape]: offsets, then steps.

    Args:
        low: minimum of each range; above `high` for an empty range, which gives a grid of zeros.
        high: same shape, the maximum.
        bits: 2, 4 or 8.
        covers: fraction of the range, around its middle, that the grid spans; None for the default of these bits.
    """
    half = (high - low).clamp_min(0) / 2 * (_COVERS[bits] if covers is None else covers)
    middle = torch.where(low <= high, (low + high) / 2, 0.0)
    half = torch.where(low <= high, half, 0.0)
    return torch.stack((middle - half, half * 2 / (2**bits - 1)))


def fit(x: Tensor, bits: int) -> Tensor:
    """The grid of least squared error for each row, among several that cover a fraction of its range.

    Numbers that are on such a grid already get the same grid again.

    Args:
        x: [..., n] float32.
        bits: 2, 4 or 8.

    Returns:
        [2, ..., 1] float32.
    """
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    best = spread(low, high, bits, 1.0)
    best_error = _error(x, best, bits)
    for covers in _TRIED[1:] if bits < 8 else ():
        grid = spread(low, high, bits, covers)
        error = _error(x, grid, bits)
        best = torch.where(error < best_error, grid, best)
        best_error = torch.minimum(error, best_error)
    return best


def _error(x: Tensor, grid: Tensor, bits: int) -> Tensor:
    offset, step = grid.unbind(0)
    return (levels(x, grid, bits) * step + offset - x).square().sum(-1, keepdim=True)


def levels(x: Tensor, grid: Tensor, bits: int) -> Tensor:
    """The nearest level of each number, float32 from 0 to 2**bits - 1.

    Args:
        x: float32, any shape.
        grid: [2, ...], broadcast over x.
        bits: 2, 4 or 8.
    """
    offset, step = grid.float().unbind(0)
    return (x - offset).div_(step.clamp_min(torch.finfo(torch.float32).tiny)).round_().clamp_(0, 2**bits - 1)


def encode(x: Tensor, grid: Tensor, bits: int) -> Tensor:
    """[..., D] float32 to [..., D * bits / 8] uint8 codes on a grid [2, ...]; D * bits is a multiple of 8.

    A byte holds numbers that lie D * bits / 8 apart, so that decoding is a concatenation.
    """
    first, *others = levels(x, grid, bits).to(torch.uint8).chunk(8 // bits, dim=-1)
    for number, other in enumerate(others, start=1):
        first = first | (other << (bits * number))
    return first


def decode(codes: Tensor, grid: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `encode`, in `dtype`."""
    parts = [(codes >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    offset, step = grid.to(dtype).unbind(0)
    return torch.addcmul(offset, torch.cat(parts, dim=-1).to(dtype), step)
