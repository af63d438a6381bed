"""Corrects Triton's interpreter, and lists the language's builtins once: each call of a device function did it, which
was most of the time. `conftest.py` imports this where kernels are interpreted.
"""

import functools
import inspect
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

multiply = InterpreterBuilder.create_dot


def in_float32(x: Any) -> Any:
    if x.data.dtype != np.uint16:
        return x
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    """Numbers in bfloat16 are stored as uint16, and were multiplied as those."""
    return multiply(self, in_float32(a), in_float32(b), *rest)


@functools.cache
def names_of_builtins(part: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(part) if tl.core.is_builtin(member)]


def patch_builtins(part: Any, builder: Any, scope: Any) -> None:
    for name in names_of_builtins(part):
        member = getattr(part, name)
        if tl.core.is_builtin(member):  # not patched yet
            interpreter._patch_attr(part, name, member, builder, scope)


InterpreterBuilder.create_dot = create_dot
interpreter._patch_builtin = patch_builtins
