"""Packed matrices as specified in `src/abi.h`, in numpy: random tiles, and unpacking."""

import numpy
import torch
from torch import Tensor

from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.packing import ROWS, tiles_shape

FP4 = numpy.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])

IQ4 = numpy.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])

TABLES = {MatrixKind.MXFP4: FP4, MatrixKind.IQ4_NL: IQ4, MatrixKind.IQ4_XS: IQ4}
"""Numbers by code."""

TWO_BITS = (MatrixKind.Q2_K, MatrixKind.Q3_K)
HIGH_BITS = (MatrixKind.INT5, MatrixKind.Q5_K, MatrixKind.Q3_K)
"""Kinds whose codes have one bit more, after the others."""

BIASES = {MatrixKind.Q6_K: 32, MatrixKind.Q3_K: 4}

_MINIMA = {"d": ("f2", (16,)), "dmin": ("f2", (16,))}
_HALVES = {"d": ("f2", (16,))}
GRID = {
    MatrixKind.INT8: lambda n: {"scale": ("f2", (n, 16))},
    MatrixKind.INT4: lambda n: {"halves": ("f2", (n, 2, 16))},
    MatrixKind.INT5: lambda n: {"halves": ("f2", (n, 2, 16))},
    MatrixKind.Q4_K: lambda n: {**_MINIMA, "scale": ("u1", (n, 16)), "min": ("u1", (n, 16))},
    MatrixKind.Q5_K: lambda n: {**_MINIMA, "scale": ("u1", (n, 16)), "min": ("u1", (n, 16))},
    MatrixKind.Q2_K: lambda n: {**_MINIMA, "nibbles": ("u1", (2 * n, 16))},
    MatrixKind.MXFP4: lambda n: {"scale": ("f2", (n, 16))},
    MatrixKind.IQ4_NL: lambda n: {"scale": ("f2", (n, 16))},
    MatrixKind.IQ4_XS: lambda n: {**_HALVES, "scale": ("i1", (n, 16))},
    MatrixKind.Q6_K: lambda n: {**_HALVES, "scale": ("i1", (2 * n, 16))},
    MatrixKind.Q3_K: lambda n: {**_HALVES, "scale": ("i1", (2 * n, 16))},
}
"""Names, dtypes and shapes of the fields at the start of a block of n groups."""

KINDS = tuple(GRID)


def block_dtype(kind: MatrixKind, groups: int) -> numpy.dtype:
    """dtype of a block of a tile."""
    grid = numpy.dtype([(name, *field) for name, field in GRID[kind](groups).items()])
    fields = [("grid", grid), ("zeros", "u1", -grid.itemsize % 64)]
    if kind == MatrixKind.INT8:
        fields.append(("codes", "i1", (groups, 8, 16, 4)))
    else:
        fields.append(("codes", "u1", (groups, 2 if kind in TWO_BITS else 4, 16, 4)))
    if kind == MatrixKind.Q6_K:
        fields.append(("upper", "u1", (groups, 2, 16, 4)))
    if kind in HIGH_BITS:
        fields.append(("upper", "u1", (groups, 16, 4)))
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
                larger = 4 if kind in (MatrixKind.INT5, MatrixKind.Q5_K) else 1  # codes than of most kinds
                grid[field] = random.uniform(0.001, 0.01, shape) / (30 if "d" in grid.dtype.names else 1) / larger
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
    elif kind in TWO_BITS:
        codes = numpy.stack([codes >> 2 * quad & 3 for quad in range(4)], 3)
    else:
        codes = numpy.stack((codes & 15, codes >> 4), 2)
    if kind == MatrixKind.Q6_K:
        upper = block["upper"].astype(int)
        codes |= numpy.stack([upper >> 2 * quad & 3 for quad in range(4)], 3) << 4
    if kind in HIGH_BITS:
        upper = block["upper"].astype(int)
        bits = [numpy.stack([upper >> (4 * half + quad) & 1 for quad in range(4)], 2) for half in range(2)]
        codes |= numpy.stack(bits, 2) << (2 if kind in TWO_BITS else 4)
    codes = TABLES[kind][codes] if kind in TABLES else codes - BIASES.get(kind, 0)
    grid = {name: block["grid"][name].astype(float) for name in block["grid"].dtype.names}
    scale, offset = scales_and_offsets(grid, codes.shape[1])
    values = codes * scale[:, :, :, None, :, None] + offset[:, :, :, None, :, None]
    return values.transpose(0, 4, 1, 2, 3, 5).reshape(len(block), 16, -1)


def scales_and_offsets(grid: dict[str, numpy.ndarray], groups: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Of the same block of all tiles, [tiles, groups, halves, rows]; one half if they are of a group."""
    if "halves" in grid:
        return grid["halves"][:, :, :1], grid["halves"][:, :, 1:]
    if "nibbles" in grid:
        both = grid["nibbles"].astype(int).reshape(len(grid["d"]), -1, 2, 16)
        return (both & 15) * grid["d"][:, None, None], -(both >> 4) * grid["dmin"][:, None, None]
    scale = grid["scale"] * grid["d"][:, None] if "d" in grid else grid["scale"]
    minima = -grid["min"] * grid["dmin"][:, None] if "min" in grid else numpy.zeros_like(scale)
    return scale.reshape(len(scale), groups, -1, 16), minima.reshape(len(scale), groups, -1, 16)
