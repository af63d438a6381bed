"""Converts the values of options that need no library; typer imports pydantic for any value, also for defaults."""

from __future__ import annotations

import re
import types
from functools import partial
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from h2o_stream.base.options import MAX_DIGITS
from h2o_stream.base.resources import user_path
from h2o_stream.errors import ConfigError

_UNKNOWN = object()
"""Stands for a value that typer has to convert, or to refuse with its message."""

_PATTERNS = {
    int: re.compile(f"[+-]?[0-9]{{1,{MAX_DIGITS}}}"),
    float: re.compile(r"[+-]?[0-9]+(\.[0-9]*)?"),
    str: re.compile(r"(?s).*"),
}
"""Texts of which all libraries make the same value."""


def convert_plainly(parameter: Any, declared: Any) -> None:
    """Let a parameter of a command, typer's or click's, convert the simple values itself, if it does not yet.

    It was declared as a type, or as `Annotated` with that and a `typer.models.OptionInfo`.
    """
    kind, *info = get_args(declared) if hasattr(declared, "__metadata__") else (declared,)
    ranged = any(getattr(entry, limit, None) is not None for entry in info for limit in ("min", "max"))
    if not ranged and not parameter.required and not isinstance(parameter.process_value, partial):
        parameter.process_value = partial(_process, parameter, kind, parameter.process_value)


def _process(parameter: Any, kind: Any, by_typer: Any, ctx: Any, value: Any) -> Any:
    """`process_value` of a parameter."""
    plain = (() if parameter.multiple else None) if value is None else _plain(parameter, kind, value)
    if plain is _UNKNOWN:
        return by_typer(ctx, value)
    return parameter.callback(ctx, parameter, plain) if parameter.callback else plain


def _plain(parameter: Any, kind: Any, value: Any) -> Any:
    """The value, or `_UNKNOWN`."""
    if type(value) is type(parameter.default) and value == parameter.default:
        return value
    kinds = [each for each in get_args(kind) if each is not types.NoneType]
    if get_origin(kind) is Literal:
        return value if isinstance(value, str) and value in kinds else _UNKNOWN
    if get_origin(kind) in (Union, types.UnionType):
        return _plain(parameter, kinds[0], value) if len(kinds) == 1 else _UNKNOWN
    if kind is Path and isinstance(value, str):  # typer looks at the file, and refuses some with a box
        flag = max(parameter.opts, key=len)
        if not value:
            raise ConfigError(f"{flag} is empty; name a file or a folder, or leave it out")
        return user_path(value, flag)
    pattern = _PATTERNS.get(kind)
    if pattern is None:
        return _UNKNOWN
    if type(value) is kind:
        return value
    return kind(value) if isinstance(value, str) and pattern.fullmatch(value) else _UNKNOWN
