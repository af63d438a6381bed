"""Matrices in 8 and 4 bits as the library reads them: tiles of four rows, each with its scales beside its codes.

See ``src/abi.h`` for the layout. Everything here is torch alone; tensors are on the CPU.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from h2o_stream.native.abi import MatrixKind

GROUP: Final = 32
"""Numbers of a row that share a scale."""

TILE: Final = 4
"""Rows that lie together."""

ALIGNMENT: Final = 32
"""Tiles are padded to a multiple of so many bytes."""


def kind_of(bits: int) -> MatrixKind:
    """How packed matrices of so many bits are held."""
    return {8: MatrixKind.INT8, 4: MatrixKind.INT4}[bits]


def tile_bytes(columns: int, bits: int) -> tuple[int, int, int]:
    """Bytes of a tile's codes, of its grid, and of the tile."""
    codes, grid = TILE * columns * bits // 8, TILE * (8 // bits) * (columns // GROUP) * 2
    return codes, grid, -(-(codes + grid) // ALIGNMENT) * ALIGNMENT


def to_tiles(codes: Tensor, grid: Tensor) -> Tensor:
    """Lay out a matrix in tiles.

    Args:
        codes: [rows, columns / 32, 32] int8, or [rows, columns / 32, 16] uint8, where the lower halves of the bytes of
            a group hold its first 16 numbers.
        grid: [rows, 1 or 2, columns / 32] float16: scales, and in 4 bits offsets.

    Returns:
        [ceil(rows / 4), bytes] uint8.
    """
    columns, bits = codes.shape[1] * GROUP, 8 // grid.shape[1]
    missing = -len(codes) % TILE
    parts = [x.contiguous().view(torch.uint8).flatten(1) for x in (codes, grid)]
    tiles = torch.cat([pad(part, (0, 0, 0, missing)).unflatten(0, (-1, TILE)).flatten(1) for part in parts], 1)
    return pad(tiles, (0, tile_bytes(columns, bits)[2] - tiles.shape[1])).contiguous()


def from_tiles(tiles: Tensor, rows: int, columns: int, bits: int) -> Tensor:
    """The numbers of a matrix in tiles: [rows, columns] float32."""
    code_bytes, grid_bytes, _ = tile_bytes(columns, bits)
    codes = tiles[:, :code_bytes].reshape(-1, columns // GROUP, GROUP * bits // 8)[:rows]
    halves = tiles[:, code_bytes : code_bytes + grid_bytes].contiguous().view(torch.float16)
    grid = halves.reshape(-1, 8 // bits, columns // GROUP)[:rows].float()
    if bits == 8:
        numbers = codes.view(torch.int8) * grid[:, 0, :, None]
    else:
        numbers = torch.cat([codes & 15, codes >> 4], -1) * grid[:, 0, :, None] + grid[:, 1, :, None]
    return numbers.flatten(1)
