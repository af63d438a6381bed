"""Packed matrices in 2 to 8 bits; `src/abi.h` documents the layout.

All arrays (`pointers.Array`) are on the CPU, and everything here needs the compiled library. `tiles` are uint8 of
`tiles_shape`: a matrix of `rows` and `columns` in the format `kind`. An array for the result may be given as `out`;
otherwise it is of the library that the input is of.
"""

from __future__ import annotations

import ctypes
from typing import Final

from h2o_stream.errors import ConfigError
from h2o_stream.native import library
from h2o_stream.native.abi import Matrix, MatrixKind
from h2o_stream.native.gguf_types import BLOCKS
from h2o_stream.native.pointers import Array, dtype_name, empty, pointer
from h2o_stream.native.threads import num_threads

ROWS: Final = 16
"""Rows per tile."""

GROUP: Final = 32
"""Columns per group, which share a scale."""

BLOCK: Final = 256
"""Columns per block."""

_ALIGNMENT = 64
"""Alignment of every part of a block, in bytes."""

_SOURCE_DTYPES = {"float32": 0, "bfloat16": 1, "uint16": 1, "float16": 2}
"""Source dtypes, as `h2o_pack` numbers them; uint16 is numpy's bfloat16."""

GGUF_KINDS: Final = {
    "Q4_0": MatrixKind.INT4,
    "Q4_1": MatrixKind.INT4,
    "Q5_0": MatrixKind.INT5,
    "Q5_1": MatrixKind.INT5,
    "Q8_0": MatrixKind.INT8,
    "Q2_K": MatrixKind.Q2_K,
    "Q3_K": MatrixKind.Q3_K,
    "Q4_K": MatrixKind.Q4_K,
    "Q5_K": MatrixKind.Q5_K,
    "Q6_K": MatrixKind.Q6_K,
    "IQ4_NL": MatrixKind.IQ4_NL,
    "IQ4_XS": MatrixKind.IQ4_XS,
    "MXFP4": MatrixKind.MXFP4,
}
"""Packed format for each GGUF type; all are lossless."""

NOT_PACKED: Final = {"gate", "router", "shared_expert_gate", "modality_router", "prediction_coefs", "correction_coefs"}
"""In transformers' names: what chooses experts, and what mixes them, or the versions of the residual stream."""

_FORMATS: Final = {
    MatrixKind.INT8: (8, lambda groups: 2 * groups),
    MatrixKind.INT4: (4, lambda groups: 4 * groups),
    MatrixKind.INT5: (5, lambda groups: 4 * groups),
    MatrixKind.Q2_K: (2, lambda groups: 4 + 2 * groups),
    MatrixKind.Q3_K: (3, lambda groups: 2 + 2 * groups),
    MatrixKind.Q4_K: (4, lambda groups: 4 + 2 * groups),
    MatrixKind.Q5_K: (5, lambda groups: 4 + 2 * groups),
    MatrixKind.Q6_K: (6, lambda groups: 2 + 2 * groups),
    MatrixKind.MXFP4: (4, lambda groups: 2 * groups),
    MatrixKind.IQ4_NL: (4, lambda groups: 2 * groups),
    MatrixKind.IQ4_XS: (4, lambda groups: 2 + groups),
}
"""Bits of a code, and bytes of a row's scales in a block of some groups."""

_WHOLE_BLOCKS: Final = frozenset(kind for kind in MatrixKind if kind.name.endswith("_K")) | {MatrixKind.IQ4_XS}


def columns_fit(kind: MatrixKind, columns: int) -> bool:
    """Whether a matrix with this many columns can be packed."""
    return columns > 0 and columns % (BLOCK if kind in _WHOLE_BLOCKS else GROUP) == 0


def tiles_shape(kind: MatrixKind, rows: int, columns: int) -> tuple[int, int]:
    """Number of tiles of a packed matrix, and bytes per tile."""
    blocks, rest = divmod(columns, BLOCK)
    size = blocks * _block_bytes(kind, BLOCK // GROUP) + (_block_bytes(kind, rest // GROUP) if rest else 0)
    return -(-rows // ROWS), size


def packed_bytes(kind: MatrixKind, rows: int, columns: int) -> int:
    """Bytes of a packed matrix."""
    tiles, size = tiles_shape(kind, rows, columns)
    return tiles * size


def _block_bytes(kind: MatrixKind, groups: int) -> int:
    bits, scales = _FORMATS[kind]
    size: int = -(-ROWS * scales(groups) // _ALIGNMENT) * _ALIGNMENT + ROWS * groups * GROUP * bits // 8
    return size


def pack(weights: Array, kind: MatrixKind, out: Array | None = None) -> Array:
    """Quantize weights [rows, columns], contiguous float32, bfloat16 or float16, to tiles in INT8 or INT4."""
    rows, columns = weights.shape
    out = _empty(kind, rows, columns, weights) if out is None else out
    dtype = dtype_name(weights.dtype)
    require_library().h2o_pack(
        ctypes.byref(_matrix(out, kind, rows, columns)),
        pointer(weights, dtype, rows * columns),
        _SOURCE_DTYPES[dtype],
        num_threads(),
    )
    return out


def repack(
    blocks: Array,
    gguf_type: int,
    kind: MatrixKind,
    rows: int,
    columns: int,
    order: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Repack the blocks of a GGUF file, uint8 with all bytes of a matrix, as tiles.

    The type is a value of `gguf_types.TensorType`, and `kind` its entry in `GGUF_KINDS`. Row i of the result is row
    order[i] of the file, int64 [rows]; None keeps the order.

    Raises:
        ConfigError: the library does not support this type.
        H2OStreamError: there are too few blocks.
        IndexError: `order` names a row that does not exist.
    """
    out = _empty(kind, rows, columns, blocks) if out is None else out
    matrix = _matrix(out, kind, rows, columns)
    block, block_bytes = BLOCKS.get(gguf_type, (1, 0))  # type: ignore[call-overload]  # an int equals its type
    if order is not None:
        _check_range(order, rows, "row")
    if require_library().h2o_repack(
        ctypes.byref(matrix),
        pointer(blocks, "uint8", rows * columns // block * block_bytes),
        gguf_type,
        pointer(order, "int64", rows),
        num_threads(),
    ):
        raise ConfigError(f"weights of GGUF type {gguf_type} cannot be repacked")
    return out


def gather(tiles: Array, kind: MatrixKind, rows: int, columns: int, ids: Array, dtype: str) -> Array:
    """Dequantize the rows `ids`, int64 [n], to [n, columns] in "float32" or "bfloat16", or raise IndexError."""
    _check_range(ids, rows, "token")
    out = empty((len(ids), columns), dtype, ids)
    matrix = _matrix(tiles, kind, rows, columns)
    require_library().h2o_gather(
        ctypes.byref(matrix),
        pointer(ids, "int64", len(ids)),
        len(ids),
        pointer(out, dtype, len(ids) * columns),
        dtype == "bfloat16",
        num_threads(),
    )
    return out


def _check_range(indices: Array, limit: int, what: str) -> None:
    if len(indices) and not (int(indices.min()) >= 0 and int(indices.max()) < limit):
        wrong = next(index for index in indices.tolist() if not 0 <= index < limit)
        raise IndexError(f"{what} {wrong} is not one of {limit}")


def _empty(kind: MatrixKind, rows: int, columns: int, like: Array) -> Array:
    return empty(tiles_shape(kind, rows, columns), "uint8", like)


def _matrix(tiles: Array, kind: MatrixKind, rows: int, columns: int) -> Matrix:
    return Matrix(pointer(tiles, "uint8", packed_bytes(kind, rows, columns)), None, rows, columns, kind)


def require_library() -> ctypes.CDLL:
    """The compiled library; raises ConfigError if there is none."""
    native = library.loaded()
    if native is None:
        raise ConfigError(f"packed weights need the compiled library: {library.why_not()}")
    return native
