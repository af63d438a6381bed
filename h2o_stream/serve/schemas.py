"""What a reply must be, a JSON schema or a grammar, in all forms in which clients ask for it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from h2o_stream.base.json_text import check_depth
from h2o_stream.serve.errors import ApiError, wrong

Schema = Mapping[str, Any] | str
"""A JSON schema, or a grammar in the form of Lark or of llama.cpp; see `Grammar`."""

_OBJECT: Schema = {"type": "object"}


def is_larger(value: Any, limit: int) -> bool:
    """Whether `size_of` a JSON value is more than this."""
    return size_of(value, limit) > limit


def size_of(value: Any, limit: float = math.inf) -> int:
    """Characters in the texts of a JSON value and its values, counted together; beyond the limit not all of them."""
    size, values = 0, [value]
    while values and size <= limit:
        value = values.pop()
        size += 1 + (len(value) if isinstance(value, str | list | dict) else 0)
        if isinstance(value, list | dict) and size <= limit:
            values += value
            values += value.values() if isinstance(value, dict) else ()
    return size


def parse_schema(body: Mapping[str, Any]) -> tuple[Schema | None, str]:
    """What the reply must be, None for any text, and the field that says so.

    Raises:
        ApiError: a field is wrong, or several ask for different things.
    """
    schemas = dict[str, Schema]()
    for name, parse in _FORMS.items():
        if body.get(name) is not None and (schema := parse(body[name], name)) is not None:
            schemas[name] = schema
    if len(schemas) > 1:
        first, second, *_ = schemas
        raise ApiError(400, f"{second} says what a reply must be, and so does {first}; leave one of them out", second)
    return next(((schema, name) for name, schema in schemas.items()), (None, "response_format"))


def parse_format(value: Any, place: str) -> Schema | None:
    """What a ``response_format`` asks for; None for any text.

    Raises:
        ApiError: it is neither.
    """
    asked = value if isinstance(value, dict) else {"type": value}
    kind = asked.get("type")
    if kind == "text" or all(item is None for item in asked.values()):
        return None
    inner = asked.get("json_schema", asked)
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if kind == "json_object" and schema is None:
        return _OBJECT
    if kind not in ("json_object", "json_schema") or not isinstance(schema, dict):
        raise wrong(place, value, "text, json_object, or json_schema with a schema")
    return schema


def _text(value: Any, place: str) -> Schema:
    """A grammar."""
    if not isinstance(value, str) or not value.strip():
        raise wrong(place, value, "a grammar in llama.cpp's form (GBNF) or llguidance's (Lark)")
    return value


def _json(value: Any, place: str) -> Schema:
    """A JSON schema, or its text."""
    if isinstance(value, str):
        try:
            check_depth(value := json.loads(value))
        except (ValueError, RecursionError):
            raise wrong(place, value, "a JSON schema") from None
    if not isinstance(value, dict):
        raise wrong(place, value, "a JSON schema")
    return value


def _choice(value: Any, place: str) -> Schema:
    """One of some texts."""
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise wrong(place, value, "a list of texts")
    return "%llguidance {}\nstart: " + " | ".join(map(json.dumps, value))


def _regex(value: Any, place: str) -> Schema:
    """A text that a regular expression describes, all of it."""
    if not isinstance(value, str) or not value:
        raise wrong(place, value, "a regular expression")
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", value.replace("\n", r"\n"))
    return f"%llguidance {{}}\nstart: /{escaped}/"


def _structured(value: Any, place: str) -> Schema | None:
    """VLLM's object with one of the others."""
    inside = {"json": _json, "regex": _regex, "choice": _choice, "grammar": _text, "json_object": _any_object}
    given = {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else {}
    if len(given) != 1 or not given.keys() <= inside.keys():
        raise wrong(place, value, f"an object with one of {', '.join(inside)}")
    return next(inside[name](item, f"{place}.{name}") for name, item in given.items())


def _any_object(value: Any, place: str) -> Schema | None:
    if not isinstance(value, bool):
        raise wrong(place, value, "true or false")
    return _OBJECT if value else None


def _ollama(value: Any, place: str) -> Schema | None:
    """``json``, or a schema."""
    return _OBJECT if value == "json" else None if value == "" else _json(value, place)


_FORMS: Mapping[str, Callable[[Any, str], Schema | None]] = {
    "response_format": parse_format,
    "text.format": parse_format,
    "json_schema": _json,
    "guided_json": _json,
    "format": _ollama,
    "grammar": _text,
    "guided_grammar": _text,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "structured_outputs": _structured,
}
"""Fields, and how they are read."""
