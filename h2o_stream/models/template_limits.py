"""The sandbox of chat templates, which are untrusted code: what they compute is limited in time and memory.

Every loop, call, filter and operator that can make something large says before what that costs; a template ends when it
has spent what it may.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE = 2**20
"""Characters of a template."""

MAX_SECONDS, MAX_CHARACTERS = 2.0, 2**26
"""What rendering may take and make, all intermediate texts counted, beside `_PER_CHARACTER` of what is given to it."""

_PER_LIST = 64
_PER_CHARACTER, _SECONDS_PER_CHARACTER = 64, 1e-6
_WIDTH = re.compile(r"\d{6}|\*")
"""In formats: widths that are refused."""


class _Budget:
    def __init__(self, characters: int) -> None:
        self._left = MAX_CHARACTERS + _PER_CHARACTER * characters
        self._end = time.thread_time() + MAX_SECONDS + _SECONDS_PER_CHARACTER * characters

    def spend(self, cost: int) -> None:
        self._left -= cost
        if self._left < 0:
            raise TemplateError("it makes too long texts")
        if time.thread_time() > self._end:
            raise TemplateError("it takes too long")


_BUDGET: ContextVar[_Budget] = ContextVar("budget")


@contextmanager
def limited(*values: Any) -> Iterator[None]:
    """Limits templates of `LimitedSandbox` in the block, by what is given to them."""
    token = _BUDGET.set(_Budget(sum(map(_deep_size, values))))
    try:
        yield
    finally:
        _BUDGET.reset(token)


class LimitedSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits: render inside `limited`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, more_filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(**options, optimized=False, finalize=_counted_output)
        filters = {**self.filters, **more_filters}
        self.filters = {name: _counted_filter(name, function) for name, function in filters.items()}
        self.globals |= {"_each": _each, "_joined": _joined}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_TEMPLATE:
            raise TemplateError(f"it has {len(source)} characters, more than {MAX_TEMPLATE}")
        tree: nodes.Template = super()._parse(source, name, filename)
        self._constants = _constant_size(tree)
        _Concatenations().visit(tree)
        for loop in tree.find_all(nodes.For):
            loop.iter = _call("_each", loop.iter, nodes.Const(_constant_size(loop)))
        return tree

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  # names of kwargs
        """See `SandboxedEnvironment.call`."""
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # the sandbox wraps methods of texts
        values = (*(() if owner is None else (owner,)), *args, *kwargs.values())
        if not isinstance(owner, str | bytes) and __obj is not safe_range:
            values = tuple(value for value in values if not isinstance(value, int))  # they are no widths
        _BUDGET.get().spend(__self._constants + _cost(getattr(__obj, "__name__", ""), values))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """See `SandboxedEnvironment.call_binop`."""
        if not (isinstance(left, int | float) and operator in ("+", "%")):
            _BUDGET.get().spend(_cost(operator, (left, right)))
        return super().call_binop(context, operator, left, right)


class _Concatenations(NodeTransformer):
    """Makes calls of ``~``, which are counted."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802  # the class of the node
        self.generic_visit(node)
        return _call("_joined", *node.nodes)


def _call(name: str, *arguments: Any) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), list(arguments), [], None, None)


def _constant_size(node: nodes.Node) -> int:
    return sum(len(data.data) for data in node.find_all(nodes.TemplateData))


def _each(items: Iterable[Any], cost: int) -> Iterator[Any]:
    """The items of a loop, each of which costs so much."""
    spend = _BUDGET.get().spend
    for item in items:
        spend(1 + cost)
        yield item


def _joined(*parts: Any) -> str:
    _BUDGET.get().spend(sum(map(_deep_size, parts)))
    return "".join(map(str, parts))


@pass_context  # so that it is not called when a template is compiled
def _counted_output(context: Any, value: Any) -> Any:
    _BUDGET.get().spend(_deep_size(value))
    return value


def _counted_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        spend, values = _BUDGET.get().spend, (*args, *kwargs.values())
        spend(_cost(name, values))
        if name in ("tojson", "string", "join", "pprint", "escape", "e", "forceescape", "safe"):
            spend(sum(map(_deep_size, values)))
        result = function(*args, **kwargs)
        spend(0 if isinstance(result, int) else _size(result))
        return result

    return counted


def _size(value: Any) -> int:
    """What something takes, without what is in its items; of a number, what it may be the width of."""
    if isinstance(value, str | bytes | list | tuple | dict | range):
        return len(value)
    return abs(value) if isinstance(value, int) else 1


def _deep_size(value: Any) -> int:
    """Characters of something written out. Lists may have one another more than once."""
    size, waiting, budget = 0, [value], _BUDGET.get(None)
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            waiting += item
        size += len(item) if isinstance(item, str) else 1
        if budget is not None and isinstance(item, dict | list | tuple):
            budget.spend(_PER_LIST)
    return size


def _cost(name: str, values: tuple[Any, ...]) -> int:
    """At most what an operator, a method of a text or a filter makes of values, of which the first is changed."""
    sizes = list(map(_size, values))
    first = values[0] if values else None
    if name == "**" or (name == "*" and isinstance(first, int) and isinstance(values[1], int)):
        bits = [value.bit_length() if isinstance(value, int) else 64 for value in values]
        return bits[0] * (sizes[1] if name == "**" else 1) + bits[1]
    if name in ("*", "expandtabs", "indent"):
        return sizes[0] * max(1, *sizes[1:]) if len(sizes) > 1 else 8 * sizes[0]
    if name in ("%", "format", "format_map") and isinstance(first, str):
        if _WIDTH.search(first):
            raise TemplateError("it has a format of too large a width")
        return sum(sizes) + sum(map(_deep_size, values)) * (1 + first.count("%") + first.count("{"))
    if name == "replace" and len(values) > 2 and isinstance(values[1], str):
        return sizes[0] + (sizes[0] // max(1, sizes[1]) + 1) * sizes[2]
    if name == "join":
        return sum(map(_deep_size, values)) * (1 + (sizes[0] if len(values) > 1 and isinstance(first, str) else 0))
    return sum(sizes)
