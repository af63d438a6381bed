"""Numbers on a grid of a few bits: fit a grid, encode, decode. Pure functions of tensors.

A grid is an offset and a step; a code is a whole number from 0 to 2**bits - 1 and stands for offset + code * step.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SHRINKS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
"""Parts of the range a grid may cover: with few bits it pays to cut outliers off."""


def fit(x: Tensor, bits: int, dim: int, there: Tensor | None = None) -> Tensor:
    """The grid of least squared error along `dim`, among several that cover a part of the range.

    What is on a grid already, and reaches its ends, is given that grid again.

    Args:
        x: [..., n, ...] numbers.
        bits: 2, 4 or 8.
        dim: the dimension that shares a grid.
        there: bool, broadcast over x; False leaves a number out.

    Returns:
        [2, ...] float32, x's shape with 1 in place of `dim`: offsets, then steps.
    """
    x = x.float()
    if there is None:
        least, most = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    else:
        least = x.masked_fill(~there, torch.inf).amin(dim, keepdim=True)
        most = x.masked_fill(~there, -torch.inf).amax(dim, keepdim=True)
    middle, half = (least + most) / 2, (most - least) / 2
    best, best_error = torch.stack((least, least)), torch.full_like(least, torch.inf)
    for shrink in _SHRINKS:
        grid = torch.stack((middle - half * shrink, half * (2 * shrink / (2**bits - 1))))
        error = (levels(x, grid, bits).mul_(grid[1]).add_(grid[0]) - x).square_()
        error = (error if there is None else error.masked_fill_(~there, 0.0)).sum(dim, keepdim=True)
        best = torch.where(error < best_error, grid, best)
        best_error = torch.minimum(error, best_error)
    return best


def levels(x: Tensor, grid: Tensor, bits: int) -> Tensor:
    """The nearest level of each number, float32 from 0 to 2**bits - 1.

    Args:
        x: any shape.
        grid: [2, ...], broadcast over x.
        bits: 2, 4 or 8.
    """
    offset, step = grid.float().unbind(0)
    return (x.float() - offset).div_(step.clamp_min(torch.finfo(torch.float32).tiny)).round_().clamp_(0, 2**bits - 1)


def encode(x: Tensor, grid: Tensor, bits: int) -> Tensor:
    """[..., D] numbers to [..., D * bits / 8] uint8 codes on a grid [2, ...]; D * bits is a multiple of 8.

    Each byte holds numbers that lie D * bits / 8 apart, so that decoding is a concatenation.
    """
    parts = levels(x, grid, bits).to(torch.uint8).chunk(8 // bits, dim=-1)
    packed = parts[0]
    for number, part in enumerate(parts[1:], start=1):
        packed = packed | (part << (bits * number))
    return packed


def decode(codes: Tensor, grid: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `encode`, in `dtype`."""
    mask = 2**bits - 1
    parts = [(codes >> shift) & mask for shift in range(0, 8, bits)]
    offset, step = grid.to(dtype).unbind(0)
    return torch.addcmul(offset, torch.cat(parts, dim=-1).to(dtype), step)
