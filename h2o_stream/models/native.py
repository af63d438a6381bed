"""Products of packed matrices with vectors: `products.cpp`, compiled for this machine once, as operations of torch.

``torch.ops.h2o_stream.multiply_packed`` can be part of a compiled graph, which calls the library itself.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from h2o_stream.resources import cache_folder

GROUP = 32
"""Numbers of a row that share a scale."""

TOGETHER = 8
"""Scales of a row are read so many at once."""

FLAGS = ["-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared"]

_ops = torch.library.Library("h2o_stream", "DEF")
_ops.define("multiply_packed(Tensor x, Tensor codes, Tensor grid, int threads) -> Tensor")

_DECLARED = (
    "AOTITorchError aoti_torch_cpu_multiply_packed(AtenTensorHandle x, AtenTensorHandle codes, AtenTensorHandle grid, "
    "int64_t threads, AtenTensorHandle* y)"
)


def called_by_graphs() -> dict[Any, list[str]]:
    """The operations that a compiled graph calls in the library, as AOT Inductor wants to be told."""
    return {torch.ops.h2o_stream.multiply_packed.default: [_DECLARED]}


def compiler() -> str | None:
    """The C++ compiler of this machine, the one that CXX names if it is set."""
    named = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return next((found for name in named if (found := shutil.which(name))), None)


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None where it cannot be compiled. It takes a second, once for a machine and version."""
    source, found = Path(__file__).with_name("products.cpp"), compiler()
    if found is None:
        return None
    told = hashlib.sha256(source.read_bytes())
    told.update(" ".join([found, *FLAGS, torch.__version__, _processor()]).encode())
    path = cache_folder() / "native" / f"products-{told.hexdigest()[:16]}.so"
    try:
        if not path.exists():
            _compile(found, source, path)
        # A graph finds in it what it calls: the names are for all.
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except (OSError, subprocess.CalledProcessError):
        return None


def _compile(compiler: str, source: Path, path: Path) -> None:
    """The library appears whole or not at all."""
    own = Path(torch.__file__).with_name("lib")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        unfinished = Path(scratch) / path.name
        links = ["-o", str(unfinished), f"-L{own}", f"-Wl,-rpath,{own}", "-ltorch_cpu", "-lgomp"]
        subprocess.run([compiler, *FLAGS, str(source), *links], check=True, capture_output=True)
        unfinished.replace(path)


def _processor() -> str:
    """What it can do: a home folder may be shared by machines that differ in that."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def grid_of(*numbers: Tensor) -> Tensor:
    """Scales, and offsets if there are any, [rows, n] each, as the library takes them: [rows, 1 or 2, N] float16.

    N is the next multiple of `TOGETHER`; behind the last number there are zeros.
    """
    return pad(torch.stack(numbers, 1).half(), (0, -numbers[0].shape[1] % TOGETHER))


def unpacked(codes: Tensor, grid: Tensor) -> Tensor:
    """The matrix [rows, columns] float32 of codes and grid; see `multiply_packed`."""
    rows, packing, _ = grid.shape
    columns = codes.shape[1] * packing
    matrix = torch.empty(rows, columns)
    _call("h2o_stream_unpack", codes, grid, matrix, rows, columns, packing, torch.get_num_threads())
    return matrix


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
    _call("h2o_stream_multiply", x, codes, grid, y, len(x), rows, codes.shape[1] * packing, packing, threads)
    return y


def _call(name: str, *arguments: Tensor | int) -> None:
    own = library()
    assert own is not None, "nothing is packed without it"
    getattr(own, name)(
        *(ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_int64(a) for a in arguments)
    )


_ops.impl("multiply_packed", multiply_packed, "CPU")


def _shaped(x: Tensor, codes: Tensor, grid: Tensor, threads: int) -> Tensor:
    return x.new_empty(len(x), len(grid))


torch.library.register_fake("h2o_stream::multiply_packed", _shaped, lib=_ops)
