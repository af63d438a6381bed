"""Operations of torch that the library carries out: ``torch.ops.h2o_stream.multiply_packed`` and others.

They can be part of a compiled graph, which calls the library itself. All are for the CPU, for float32 and bfloat16.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from h2o_stream.native import legacy_library as library

GROUP = 32
"""Numbers of a row of a packed matrix that share a scale."""

TOGETHER = 8
"""Scales of a row are read so many at once."""

DTYPES = (torch.float32, torch.bfloat16)
"""What the library computes with."""

_ops = torch.library.Library("h2o_stream", "DEF")
_ops.define("multiply_packed(Tensor x, Tensor codes, Tensor grid, int threads) -> Tensor")
_ops.define("multiply_few(Tensor x, Tensor matrix, int threads) -> Tensor")
_ops.define(
    "weigh_one(Tensor query, Tensor keys, Tensor values, Tensor? turns, Tensor? behind, Tensor? hidden, "
    "float scaling, float softcap, int threads) -> (Tensor, Tensor)"
)

_DECLARED = {
    "multiply_packed": "AtenTensorHandle x, AtenTensorHandle codes, AtenTensorHandle grid, int64_t threads, "
    "AtenTensorHandle* y",
    "multiply_few": "AtenTensorHandle x, AtenTensorHandle matrix, int64_t threads, AtenTensorHandle* y",
    "weigh_one": "AtenTensorHandle query, AtenTensorHandle keys, AtenTensorHandle values, AtenTensorHandle* turns, "
    "AtenTensorHandle* behind, AtenTensorHandle* hidden, double scaling, double softcap, int64_t threads, "
    "AtenTensorHandle* output, AtenTensorHandle* probs",
}


def called_by_graphs() -> dict[Any, list[str]]:
    """The operations that a compiled graph calls in the library, as AOT Inductor wants to be told."""
    return {
        getattr(torch.ops.h2o_stream, name).default: [f"AOTITorchError aoti_torch_cpu_{name}({arguments})"]
        for name, arguments in _DECLARED.items()
    }


def grid_of(*numbers: Tensor) -> Tensor:
    """Scales, and offsets if there are any, [rows, n] each, as the library takes them: [rows, 1 or 2, N] float16.

    N is the next multiple of `TOGETHER`; behind the last number there are zeros.
    """
    return pad(torch.stack(numbers, 1).half(), (0, -numbers[0].shape[1] % TOGETHER))


def unpacked(codes: Tensor, grid: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix [rows, columns] of codes and grid; see `multiply_packed`."""
    rows, packing, _ = grid.shape
    columns = codes.shape[1] * packing
    matrix = torch.empty(rows, columns, dtype=dtype if dtype in DTYPES else torch.float32)
    in_bfloat16, threads = matrix.dtype == torch.bfloat16, torch.get_num_threads()
    _call("unpack", codes, grid, matrix, rows, columns, packing, in_bfloat16, threads)
    return matrix.to(dtype)


def multiply_packed(x: Tensor, codes: Tensor, grid: Tensor, threads: int) -> Tensor:
    """X W'.

    Args:
        x: [n, columns] float32.
        codes: [rows, columns] int8, or [rows, columns / 2] uint8, where the first 16 numbers of a group lie in the
            lower halves of its 16 bytes.
        grid: scales, and in 4 bits offsets; see `grid_of`.
        threads: that share the work.

    Returns:
        [n, rows] float32.
    """
    rows, packing, _ = grid.shape
    x, y = x.contiguous(), x.new_empty(len(x), rows)
    _call("multiply_packed", x, codes, grid, y, len(x), rows, codes.shape[1] * packing, packing, threads)
    return y


def multiply_few(x: Tensor, matrix: Tensor, threads: int) -> Tensor:
    """X W', read at the speed of the memory while there are few vectors.

    Args:
        x: [n, columns].
        matrix: [rows, columns] in the dtype of x.
        threads: that share the work.

    Returns:
        [n, rows] in the same dtype.
    """
    x, matrix = x.contiguous(), matrix.contiguous()
    y = x.new_empty(x.shape[0], matrix.shape[0])
    _call("multiply_few", x, matrix, y, len(x), *matrix.shape, x.dtype == torch.bfloat16, threads)
    return y


def weigh_one(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    turns: Tensor | None,
    behind: Tensor | None,
    hidden: Tensor | None,
    scaling: float,
    softcap: float,
    threads: int,
) -> tuple[Tensor, Tensor]:
    """Attention of one query of each row; see `h2o_stream.cache.weigh.weigh`.

    Args:
        query: [B, Hq, 1, D], rotated.
        keys: [B, Hkv, K, D] in its dtype.
        values: [B, Hkv, K, Dv] in its dtype.
        turns: [N, Drot] in its dtype, cosines and sines by distance; None where keys are rotated already.
        behind: [B, Hkv, K] int64, distances by which keys are rotated back; with turns.
        hidden: [B, Hkv, 1, K] bool, what may not be seen; None for nothing.
        scaling: a factor of the products.
        softcap: their bound, by tanh; 0 for none.
        threads: that share the work.

    Returns:
        Output [B, 1, Hq, Dv] in the query's dtype and float32 probabilities [B, Hkv, G, 1, K].
    """
    rows, kv_heads, places, size = keys.shape
    query, keys, values = query.contiguous(), keys.contiguous(), values.contiguous()
    turns, behind, hidden = (None if x is None else x.contiguous() for x in (turns, behind, hidden))
    output, probs = _weighed(query, keys, values, turns, behind, hidden, scaling, softcap, threads)
    _call(
        "weigh_one",
        *(query, keys, values, turns, behind, hidden, output, probs, rows * kv_heads, probs.shape[2], places, size),
        *(values.shape[3], 0 if turns is None else turns.shape[1]),
        *(scaling, softcap, query.dtype == torch.bfloat16, threads),
    )
    return output, probs


def _call(name: str, *arguments: Tensor | float | None) -> None:
    own = library.loaded()
    assert own is not None, "nothing asks for it otherwise"
    getattr(own, f"h2o_stream_{name}")(*map(_handed_over, arguments))


def _handed_over(argument: Tensor | float | None) -> Any:
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr() if argument is not None else None)
    return ctypes.c_double(argument) if isinstance(argument, float) else ctypes.c_int64(argument)


def _product(x: Tensor, matrix: Tensor, threads: int) -> Tensor:
    return x.new_empty(x.shape[0], matrix.shape[0])


def _packed_product(x: Tensor, codes: Tensor, grid: Tensor, threads: int) -> Tensor:
    return x.new_empty(x.shape[0], grid.shape[0])


def _weighed(query: Tensor, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows, kv_heads, places = keys.shape[:3]
    groups = query.shape[1] // kv_heads
    output = query.new_empty(rows, 1, query.shape[1], values.shape[3])
    return output, query.new_empty(rows, kv_heads, groups, 1, places, dtype=torch.float32)


for _name, _carried_out, _shaped in (
    ("multiply_packed", multiply_packed, _packed_product),
    ("multiply_few", multiply_few, _product),
    ("weigh_one", weigh_one, _weighed),
):
    _ops.impl(_name, _carried_out, "CPU")
    torch.library.register_fake(f"h2o_stream::{_name}", _shaped, lib=_ops)
