"""Calls of tools that a model writes otherwise than its template: JSON in a block of code, between tags, or bare.

Only what names a given tool is a call. Everything else is text, and streams as soon as that is certain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from h2o_stream.base.json_text import check_depth
from h2o_stream.base.resources import replace_surrogates
from h2o_stream.session.messages import read_arguments

_NAMES = ("name", "function", "tool", "tool_name", "function_name")
"""Keys of the name of a tool."""

_ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Keys of its arguments."""

_OUTER = ("function", "tool_call", "function_call", "tool_calls")
"""Keys of an object or a list that has both."""

_ASIDE = ("id", "type", "index")
"""Keys that say nothing about what is called."""

_OPENING = re.compile(r"```[\w+-]*\s*|<\|?\w+\|?>\s*")
_BEGUN_OPENING = re.compile(r"`{1,2}|```[\w+-]*|<\|?\w*\|?")
_CLOSING, _NEXT_CLOSING = re.compile(r"```|</\w+>"), re.compile(r"\s*(?:```|</\w+>)")
_BEGUN_CLOSING = re.compile(r"```|</\w+>|(?:`{1,2}|</?\w*)$")
_BEGUN_OBJECT = re.compile(r'(?:\[\s*){0,2}(?:\{\s*(?:"(?P<key>\w*)(?P<closed>"\s*(?::.*)?)?)?)?', re.DOTALL)
_NAMED = re.compile(r'"(?:name|tool|tool_name|function_name)"\s*:\s*"([^"\\]*)"')
_JSON, _START = re.compile(r"[{\[]"), re.compile(r"[`<{\[]")
_WORDS, _ESCAPE = ("true", "false", "null", "-"), len("\\ud83d")
_MAX_WORK, _PER_CHARACTER, _INCOMPLETE = 2**25, 2**10, 16
"""Characters that are looked at until the rest of a text is no call, of all of it and for each of its own: for each
bracket, those of the whole text; so many times, if what it begins may become a call.
"""

_DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True)
class Call:
    """A tool that is called; with the id of the call, if somebody gave it one."""

    name: str
    arguments: Mapping[str, Any]
    id: str = field(default="", compare=False)


class _Read(NamedTuple):
    value: Any
    stop: int
    incomplete: bool = False


class _Found(NamedTuple):
    start: int
    stop: int
    calls: list[Call]


def read_calls(text: str, names: Collection[str]) -> tuple[str, tuple[Call, ...]]:
    """A text without the calls in it of tools with these names, and the calls."""
    texts, calls, end = list[str](), list[Call](), 0
    for span in _find(text, names):
        texts.append(text[end : span.start])
        calls += span.calls
        end = span.stop
    if not calls:
        return text, ()
    rest = " ".join(filter(None, (part.strip(" \n;,") for part in (*texts, text[end:]))))
    return rest, tuple(calls)


def certain_size(text: str, names: Collection[str]) -> tuple[int, int]:
    """How much of a text is certainly no call, whatever follows; and how much of it says nothing of what follows."""
    place = 0
    while (start := _START.search(text, place)) is not None:
        place = start.start()
        opening = _OPENING.match(text, place)
        first = opening.end() if opening else place
        if first == len(text) or _BEGUN_OPENING.fullmatch(text, place):
            return place, place
        read = _read(text, first)
        if read.incomplete and not _may_become_call(text[first:], names):
            return len(text), place
        if read.incomplete or calls_in(read.value, names):
            return place, place
        place = max(read.stop, place + 1)
    return len(text), len(text)


def _find(text: str, names: Collection[str]) -> Iterator[_Found]:
    """The calls in a text. Nothing inside of other JSON is one."""
    place, work = 0, min(_MAX_WORK, _PER_CHARACTER * len(text))
    while work > 0 and (start := _JSON.search(text, place)) is not None:
        place, first = start.end(), start.start()
        read = _read(text, first)
        work -= len(text) * (_INCOMPLETE if read.incomplete else 1)
        if read.incomplete:
            if not _may_become_call(text[first:], names):
                return
            read = _completed(text, first)
        if calls := calls_in(read.value, names):
            begin, stop = _with_wrapping(text, first, read.stop)
            yield _Found(begin, stop, calls)
            place = stop
        elif read.value is not None:
            place = read.stop


def _read(text: str, start: int) -> _Read:
    """The object or list that begins there."""
    if text[start] not in "{[":
        return _Read(None, start)
    try:
        read = _Read(*_DECODER.raw_decode(text, start))
        check_depth(read.value)
        return read
    except RecursionError:
        return _Read(None, start, incomplete=True)
    except json.JSONDecodeError as error:
        rest = text[error.pos :].rstrip()
        begun = any(word.startswith(rest) for word in _WORDS) or (len(rest) < _ESCAPE and "escape" in error.msg)
        closed = _BEGUN_CLOSING.match(rest) is not None
        return _Read(None, start, incomplete=begun or closed or error.msg.startswith("Unterminated string"))
    except ValueError:  # it is too deep, or a number has too many digits
        return _Read(None, start)


def _completed(text: str, start: int) -> _Read:
    """A text with the brackets that a model has left out before it closed a block or a tag."""
    if closing := _CLOSING.search(text, start):
        for brackets in ("}", "]", "}}", "}]", "}}]"):
            read = _read(text[start : closing.start()] + brackets, 0)
            if read.value is not None:
                return _Read(read.value, closing.start())
    return _Read(None, start, incomplete=True)


def _with_wrapping(text: str, start: int, stop: int) -> tuple[int, int]:
    """Where the block of code or the tags around a call begin and end, if it is in some."""
    opening = next((x for x in _OPENING.finditer(text, max(start - 60, 0), start) if x.end() == start), None)
    closing = _NEXT_CLOSING.match(text, stop)
    return opening.start() if opening else start, closing.end() if closing and opening else stop


def calls_in(value: Any, names: Collection[str] | None = None) -> list[Call]:
    """The calls that a JSON value consists of, of tools with these names or any; none if a part is something else."""
    if isinstance(value, list):
        calls = [calls_in(each, names) for each in value]
        return [call for each in calls for call in each] if calls and all(calls) else []
    if not isinstance(value, dict):
        return []
    keys = [key for key in value if key not in _ASIDE]
    if len(keys) == 1 and keys[0] in _OUTER and isinstance(value[keys[0]], dict | list):
        return calls_in(value[keys[0]], names)
    name = next((value[key] for key in _NAMES if isinstance(value.get(key), str)), "")
    arguments_in = [key for key in _ARGUMENTS if key in value]
    if (
        not name.strip()
        or (names is not None and name not in names)
        or len(arguments_in) > 1
        or len(keys) != 1 + len(arguments_in)
    ):
        return []
    arguments = read_arguments(value[arguments_in[0]]) if arguments_in else {}
    return [] if arguments is None else [Call(replace_surrogates(name), arguments)]


def _may_become_call(text: str, names: Collection[str]) -> bool:
    """Whether the beginning of an object or a list may be that of a call."""
    begun = _BEGUN_OBJECT.fullmatch(text)
    if begun is None:
        return False
    key, keys = begun["key"], (*_NAMES, *_ARGUMENTS, *_OUTER, *_ASIDE)
    if key is not None and not any(known == key if begun["closed"] else known.startswith(key) for known in keys):
        return False
    named = _NAMED.search(text)
    return named is None or named[1] in names
