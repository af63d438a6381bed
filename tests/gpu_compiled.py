"""Compiles every launch of the kernels for GPUs, without one: ``python -m tests.gpu_compiled CASE...``.

The host code runs on tensors of the CPU; a launch compiles the kernel instead, for each of the compute capabilities.
"""

import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tests.gpu_cases import CASES, KERNELS

SHARED = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that a program can have, by compute capability."""

CHANGING = {"offset", "pin_count", "slots", "table_rows", "tokens", "transient_count"}
OPTIONS = {"num_warps", "num_stages", "launch_pdl"}
NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64", torch.int32: "i32",
    torch.int16: "i16", torch.uint8: "u8", torch.int8: "i8",
}  # fmt: skip
compiled: dict[Any, int] = {}
capabilities: list[int] = []
"""For which launches are compiled now."""


def kind_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + NAMES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_launch(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    chosen = {name: kwargs.pop(name) for name in OPTIONS & kwargs.keys()}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    assert values.keys() == set(kernel.arg_names), set(kernel.arg_names) ^ values.keys()
    free = {p.name for p in kernel.params if not p.do_not_specialize and type(values[p.name]) is int}
    assert not CHANGING & free, "compiled again while a stream runs"
    constants = {p.name for p in kernel.params if p.is_constexpr or values[p.name] is None}
    constants |= {name for name in free if values[name] == 1}  # as a launch does
    signature = {name: "constexpr" if name in constants else kind_of(values[name]) for name in kernel.arg_names}
    key = tuple(map(str, (capabilities, kernel, signature, {name: values[name] for name in constants}, chosen)))
    if key in compiled:
        return
    aligned = {
        (number,): [["tt.divisibility", 16]] for number, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or (name in free - constants and values[name] % 16 == 0)
    }  # fmt: skip
    if kernel.__name__ == "decode_kernel":
        assert values["P"] >= 32 * chosen["num_warps"], "threads share places"
    for capability in capabilities:
        options = dict(chosen)
        overlaps = {"PDL": True} if "PDL" in constants and capability >= 90 else {}
        options |= {"launch_pdl": bool(overlaps)}
        source = ASTSource(kernel, signature, {name: values[name] for name in constants} | overlaps, aligned)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert made.asm["cubin"]
        first, waits, _ = made.asm["ptx"].partition("griddepcontrol.wait")
        assert bool(waits) == bool(overlaps)
        assert not waits or not re.search(r"\b(st\.global|atom|red)\.", first), "stored before the wait"
        shared = made.metadata.shared
        assert shared <= SHARED[capability], (kernel.__name__, capability, shared)
    compiled[key] = len(compiled)
    print(f"{kernel.__name__}: {made.metadata.shared} bytes of shared memory", flush=True)


def main(cases: dict[str, Callable[[], None]], names: list[str]) -> None:
    JITFunction.run = compile_launch
    for size in sorted({*SHARED.values()}):
        KERNELS._shared = size
        capabilities[:] = [capability for capability, shared in SHARED.items() if shared == size]
        for name in names:
            cases[name]()


if __name__ == "__main__":
    main(CASES, sys.argv[1:] or [*CASES])
