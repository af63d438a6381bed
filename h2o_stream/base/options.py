"""How a setting is given on a command line: flags, help and parser. Knows no command-line library."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from h2o_stream.base.json_text import parse_json
from h2o_stream.base.resources import is_file, named_prompts, replace_surrogates
from h2o_stream.base.texts import read_text
from h2o_stream.errors import ConfigError, DataError


class Option:
    """The option of a field: ``tokens: Annotated[int, Option("Tokens read.", min=1)] = 4096``.

    Type, default and, without flags, the name are the field's. `parse` turns text, and the flag for messages, into a
    value that its type cannot parse. The panel is a heading in ``--help``; `more` are other arguments of
    `typer.Option`, such as min, max, hidden, callback.
    """

    def __init__(
        self,
        help: str,
        *flags: str,
        parse: Callable[[str, str], Any] | None = None,
        panel: str | None = None,
        **more: Any,
    ) -> None:
        self.help, self.flags, self.parse, self.panel, self.more = help, flags, parse, panel, more


def listed(text: str, flag: str) -> tuple[str, ...]:
    """The words between commas; raises ConfigError if there are none."""
    items = tuple(item.strip() for item in text.split(",") if item.strip())
    if not items:
        raise ConfigError(f"{flag} is empty; give one or more, separated by commas")
    return items


def listed_if_any(text: str, flag: str) -> tuple[str, ...]:
    """What `listed` gives; () for an option that is empty."""
    return listed(text, flag) if text else ()


def some_of(what: str, choices: Collection[str], may_be_none: bool = False) -> Callable[[str, str], tuple[str, ...]]:
    """A parser of words between commas, each once, that are all among the choices; messages say `what` they are."""

    def parse(text: str, flag: str) -> tuple[str, ...]:
        words = tuple(dict.fromkeys((listed_if_any if may_be_none else listed)(text, flag)))
        for word in words:
            if word not in choices:
                raise ConfigError(f"{what} {word!r} is unknown; {flag} takes some of {', '.join(choices)}")
        return words

    return parse


def paths(text: str, flag: str) -> tuple[Path, ...]:
    """File names, separated by commas."""
    return tuple(map(Path, listed(text, flag)))


MAX_DIGITS = 20
"""Of a whole number: Python reads no more than some thousands, and floats have no more than some hundreds."""

_DIGITS = f"{{1,{MAX_DIGITS}}}"


def whole_number(text: str) -> int | None:
    """The whole number that a text is; None if it is none, or has more digits than any that is used."""
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else None


def numbers(text: str, flag: str) -> tuple[int, ...]:
    """Whole numbers, separated by commas; raises ConfigError if one is no whole number, or there are none."""
    parsed = []
    for item in listed(text, flag):
        if (number := whole_number(item)) is None:
            raise ConfigError(f"{item!r} is not a whole number; {flag} takes numbers and commas")
        parsed.append(number)
    return tuple(parsed)


def numbers_if_any(text: str, flag: str) -> tuple[int, ...]:
    """What `numbers` gives; () for an option that is empty."""
    return numbers(text, flag) if text else ()


_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(text: str, flag: str) -> int:
    """A size with its unit, in bytes; raises ConfigError if it is not a size."""
    size = re.fullmatch(rf"(\d{_DIGITS}(?:\.\d{_DIGITS})?)\s*([a-zA-Z]*)", text.strip())
    if not size or size[2].upper() not in _UNITS:
        raise ConfigError(f"{text!r} is not a size; {flag} takes one like 128MiB or 2GiB")
    return int(float(size[1]) * _UNITS[size[2].upper()])


def sizes(text: str, flag: str) -> tuple[int, ...]:
    """Sizes in bytes, separated by commas; raises ConfigError if one is not a size."""
    return tuple(parse_bytes(item, flag) for item in listed_if_any(text, flag))


def text_or_file(text: str | None, text_option: str, file: Path | None, file_option: str) -> str | None:
    """A text that is given directly, or as a file or the name of one in prompts/. Messages name the options.

    Raises:
        ConfigError: both were given.
        DataError: the file cannot be read as UTF-8.
    """
    if file is None:
        return text if text is None else replace_surrogates(text)
    if text is not None:
        raise ConfigError(f"{text_option} and {file_option} were both given; leave one of them out")
    named = None if is_file(file) else named_prompts().get(str(file))
    return read_text(file, f"{file_option} {file}").strip() if named is None else named


def json_object(file: Path, option: str) -> dict[str, Any]:
    """The JSON object in a file; raises DataError, naming the option, if it cannot be read, or holds something else."""
    place = f"{option} {file}"
    try:
        value = parse_json(read_text(file, place))
    except ValueError as error:
        raise DataError(f"{place} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{place} holds {'a list' if isinstance(value, list) else repr(value)[:40]}, not a JSON object")
    return value
