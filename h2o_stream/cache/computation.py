"""What a model computes, as far as its weights and config do not say: its code, its hooks and flags of its modules."""

from __future__ import annotations

import functools
import hashlib
import inspect
from pathlib import Path
from typing import Any

from torch import nn

_PLAIN = (bool, int, float, str, type(None))

_LIBRARIES = {"torch", "transformers", "accelerate"}
"""Whose hooks and patches are known by their name and version."""


def computation_of(model: nn.Module) -> str | None:
    """Hex digits that tell the computation of a model from others with the same weights and config.

    Returns:
        None where only this process could tell: a class or a function was made on the fly, or somebody else's hook or
        forward was put into a module.
    """
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        kind: Any = type(module)
        marks = [_class(kind, kind.forward), *map(_replacement, _replacements(module))]
        if None in marks:
            return None
        plain = {key: value for key, value in vars(module).items() if _is_plain(value)}
        digest.update(f"{name} {marks} {plain}".encode())
    return digest.hexdigest()[:16]


def _is_plain(value: Any) -> bool:
    """Whether a value is nothing but numbers and texts."""
    if isinstance(value, dict):
        return bool(value) and all(isinstance(x, _PLAIN) for pair in value.items() for x in pair)
    if isinstance(value, list | tuple):
        return all(isinstance(x, _PLAIN) for x in value)
    return isinstance(value, _PLAIN)


def _replacements(module: nn.Module) -> list[Any]:
    """Functions that were put into a module beside those of its class."""
    forward = vars(module).get("forward")
    return [
        *([] if forward is None else [forward]),
        *module._forward_pre_hooks.values(),
        *module._forward_hooks.values(),
    ]


def _replacement(function: Any) -> str | None:
    """The name of a function of a library, wherever it says that it is from."""
    function = getattr(function, "func", function)
    home = getattr(function, "__globals__", {}).get("__name__", "")
    return f"{home}.{function.__code__.co_name}" if home.partition(".")[0] in _LIBRARIES else None


@functools.cache
def _class(kind: Any, forward: Any) -> str | None:
    """A class of modules: its name, and the files that it and its forward are from."""
    codes = [getattr(function, "__code__", None) for function in (forward, inspect.unwrap(forward))]
    if "<locals>" in kind.__qualname__ or None in codes:
        return None
    try:
        files = {inspect.getfile(kind), *(code.co_filename for code in codes if code)}
        sums = [hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] for file in sorted(files)]
    except (OSError, TypeError):
        return None
    return f"{kind.__module__}.{kind.__qualname__} {[code.co_firstlineno for code in codes if code]} {sums}"
