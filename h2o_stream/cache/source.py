"""The source of classes and functions from outside, as part of the identity of models and policies."""

from __future__ import annotations

import hashlib
import inspect
import sys
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from h2o_stream.base.registry import resolve
from h2o_stream.config import CachePlan

VERSIONED = {"h2o_stream", "torch", "transformers", "peft", "accelerate", "deepspeed"}
"""Packages whose source the version identifies; others add themselves."""

_sources: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Results of `source_of`: a file may be edited after it was imported."""


def policy_source(plan: CachePlan) -> str:
    """16 hex digits of the source of a user's policy; nothing for a built-in one."""
    module = plan.rule.partition(":")[0]
    return "" if _is_versioned(module) else source_of(resolve(plan.rule))


def source_of(thing: Any) -> str:
    """16 hex digits of the source modules of a class (with its bases) or a function.

    Without source the byte code counts. Nothing for packages whose version is recorded.
    """
    if thing not in _sources:
        parts = [part for part in getattr(thing, "__mro__", (thing,)) if not _is_versioned(home_of(part))]
        sources = "".join(f"{part.__qualname__} {_source(part)}" for part in parts)
        _sources[thing] = hashlib.sha256(sources.encode()).hexdigest()[:16] if parts else ""
    return _sources[thing]


def _source(thing: Any) -> str:
    for where in (sys.modules.get(home_of(thing)), thing):
        try:
            return inspect.getsource(where)  # type: ignore[arg-type]
        except (OSError, TypeError):  # typed in, or compiled
            continue
    functions = vars(thing).values() if isinstance(thing, type) else (thing,)
    codes = [function.__code__ for function in functions if hasattr(function, "__code__")]
    return "".join(f"{code.co_name} {code.co_code.hex()} {code.co_names} {code.co_consts}" for code in codes)


def home_of(thing: Any) -> str:
    """The module it is defined in: wrappers of a function copy its `__module__`."""
    return str(thing.__globals__["__name__"] if isinstance(thing, FunctionType) else getattr(thing, "__module__", ""))


def _is_versioned(module: str) -> bool:
    package = module.partition(".")[0]
    return package in VERSIONED or package in sys.stdlib_module_names
