"""Packed matrices as specified in `src/abi.h`, in numpy: random tiles, and unpacking."""

import numpy
import torch
from torch import Tensor

from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.packing import ROWS, tiles_shape

KINDS = (MatrixKind.INT8, MatrixKind.INT4, MatrixKind.Q4_K, MatrixKind.Q6_K, MatrixKind.MXFP4)

FP4 = numpy.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])

GRID = {
    MatrixKind.INT8: lambda n: {"scale": ("f2", (n, 16))},
    MatrixKind.INT4: lambda n: {"halves": ("f2", (n, 2, 16))},
    MatrixKind.Q4_K: lambda n: {
        "d": ("f2", (16,)),
        "dmin": ("f2", (16,)),
        "scale": ("u1", (n, 16)),
        "min": ("u1", (n, 16)),
    },
    MatrixKind.MXFP4: lambda n: {"scale": ("f2", (n, 16))},
    MatrixKind.Q6_K: lambda n: {"d": ("f2", (16,)), "scale": ("i1", (2 * n, 16))},
}
"""Names, dtypes and shapes of the fields at the start of a block of n groups."""


def block_dtype(kind: MatrixKind, groups: int) -> numpy.dtype:
    """dtype of a block of a tile."""
    grid = numpy.dtype([(name, *field) for name, field in GRID[kind](groups).items()])
    fields = [("grid", grid), ("zeros", "u1", -grid.itemsize % 64)]
    fields.append(
        ("codes", "i1", (groups, 8, 16, 4)) if kind == MatrixKind.INT8 else ("codes", "u1", (groups, 4, 16, 4))
    )
    if kind == MatrixKind.Q6_K:
        fields.append(("upper", "u1", (groups, 2, 16, 4)))
    return numpy.dtype(fields)


def tile_dtype(kind: MatrixKind, columns: int) -> numpy.dtype:
    """dtype of a tile, whose fields are its numbered blocks."""
    groups = [min(256, columns - column) // 32 for column in range(0, columns, 256)]
    return numpy.dtype([(str(number), block_dtype(kind, count)) for number, count in enumerate(groups)])


def random_tiles(kind: MatrixKind, rows: int, columns: int, seed: int = 0) -> Tensor:
    """Random codes, including the extremes, with scales of ordinary magnitude; uint8 of `tiles_shape`."""
    random = numpy.random.default_rng(seed)
    tiles = numpy.zeros(-(-rows // ROWS), tile_dtype(kind, columns))
    assert (len(tiles), tiles.itemsize) == tiles_shape(kind, rows, columns)
    for name in tiles.dtype.names:
        block = tiles[name]
        grid = block["grid"]
        for field in grid.dtype.names:
            shape, dtype = grid[field].shape, grid[field].dtype
            if dtype == numpy.float16:
                grid[field] = random.uniform(0.001, 0.01, shape) / (30 if "d" in grid.dtype.names else 1)
                if field == "halves":
                    grid[field][:, :, 1] -= 0.02
            else:
                limits = numpy.iinfo(dtype)
                grid[field] = random.integers(limits.min, limits.max, shape, endpoint=True)
        for field in {"codes", "upper"} & set(block.dtype.names):
            low = -127 if kind == MatrixKind.INT8 else 0
            block[field] = random.integers(low, 127 if low else 255, block[field].shape, endpoint=True)
            block[field][:, 0] = -127 if low else 255
    return torch.from_numpy(tiles.view(numpy.uint8).reshape(len(tiles), -1).copy())


def numbers(tiles: Tensor, kind: MatrixKind, rows: int, columns: int) -> Tensor:
    """The unpacked matrix [rows, columns], float64."""
    blocks = tiles.contiguous().numpy().view(tile_dtype(kind, columns))[:, 0]
    decoded = [block_numbers(blocks[name], kind) for name in blocks.dtype.names]
    return torch.from_numpy(numpy.concatenate(decoded, 2).reshape(-1, columns)[:rows])


def block_numbers(block: numpy.ndarray, kind: MatrixKind) -> numpy.ndarray:
    """The same block of all tiles, unpacked to [tiles, rows, columns] float64."""
    codes = block["codes"].astype(int)
    if kind == MatrixKind.INT8:
        codes = numpy.stack(numpy.split(codes, 2, 2), 2)  # [tiles, groups, halves, quads, rows, 4]
    else:
        codes = numpy.stack((codes & 15, codes >> 4), 2)
    if kind == MatrixKind.MXFP4:
        codes = FP4[codes]
    grid = {name: block["grid"][name].astype(float) for name in block["grid"].dtype.names}
    offset = 0.0
    if kind == MatrixKind.Q6_K:
        upper = block["upper"].astype(int)
        codes |= numpy.stack([upper >> 2 * quad & 3 for quad in range(4)], 3) << 4
        codes -= 32
        scale = grid["d"][:, None] * grid["scale"]
        scale = scale.reshape(len(block), -1, 2, 16)
    else:
        if kind == MatrixKind.INT4:
            grid["scale"], offset = grid["halves"][:, :, 0], grid["halves"][:, :, 1]
        scale = grid["scale"] * grid["d"][:, None] if kind == MatrixKind.Q4_K else grid["scale"]
        scale = scale[:, :, None]
    if kind == MatrixKind.Q4_K:
        offset = -grid["dmin"][:, None] * grid["min"]
    if kind in (MatrixKind.INT4, MatrixKind.Q4_K):
        offset = offset[:, :, None, None, :, None]
    values = codes * scale[:, :, :, None, :, None] + offset
    return values.transpose(0, 4, 1, 2, 3, 5).reshape(len(block), 16, -1)
