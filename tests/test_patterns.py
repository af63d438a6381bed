"""Regular expressions take linear time of any text: Python does nothing else while it searches."""

import ast
import importlib
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from re import _constants as kinds  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import pytest

import h2o_stream

SOURCE = Path(h2o_stream.__file__).parent

AT_START = {
    "recall.speech.LABEL", "recall.speech._REQUEST", "recall.speech._TASK", "models.other_files._WEB_PAGE",
    "models.gguf._PART",
    "session.other_calls._NEXT_CLOSING", "recall.passages._ABBREVIATION",
}  # fmt: skip
"""Patterns that are looked for at one place of a text only, or at the end of a short one."""

SHORT = {"recall.wholes._WHOLE": "of messages of up to 200 characters"}

LETTERS = " a1\n.-A,:_'\"`</|[{一?!"
REPEATS = (kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT)
SIZE, MAX_S = 4000, 0.1


def patterns() -> dict[str, re.Pattern[Any]]:
    """All that modules have, and constant ones in calls."""
    found = dict[str, re.Pattern[Any]]()
    for path in sorted(SOURCE.rglob("*.py")):
        source, name = path.read_text(), ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        if "re.compile(" in source:
            values = vars(importlib.import_module(f"h2o_stream.{name}"))
            found |= {f"{name}.{key}": value for key, value in values.items() if isinstance(value, re.Pattern)}
        for call in ast.walk(ast.parse(source)) if re.search(r"\bre\.[mfs]", source) else ():
            function = call.func if isinstance(call, ast.Call) else None
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and call.args:  # type: ignore[attr-defined]
                first = call.args[0]  # type: ignore[attr-defined]
                if function.value.id == "re" and isinstance(first, ast.Constant) and function.attr != "compile":
                    place = "at start " if function.attr in ("match", "fullmatch") else ""
                    found[f"{place}{name}: {first.value}"] = re.compile(first.value)
    return found


def example(nodes: Any) -> str:
    """A short text that a part of a pattern describes."""
    text = ""
    for kind, value in nodes:
        if kind in REPEATS:
            text += example(value[2]) * value[0]
        elif kind is kinds.BRANCH:
            text += example(value[1][0])
        elif kind is kinds.SUBPATTERN:
            text += example(value[3])
        elif kind is kinds.ATOMIC_GROUP:
            text += example(value)
        elif fitting := letters(kind, value):
            text += fitting[0]
    return text


def letters(kind: Any, value: Any) -> list[str]:
    """Letters that a part of a pattern describes; none if it is a place."""
    if kind is kinds.LITERAL:
        return [chr(value)]
    if kind is kinds.ANY:
        return [*LETTERS]
    if kind is kinds.NOT_LITERAL:
        return [letter for letter in LETTERS if ord(letter) != value]
    if kind is not kinds.IN:
        return []
    negated = value[0][0] is kinds.NEGATE
    return [letter for letter in LETTERS if any(fits(letter, *part) for part in value) != negated] or ["a"]


def fits(letter: str, kind: Any, value: Any) -> bool:
    if kind is kinds.CATEGORY:
        name = str(value).removeprefix("CATEGORY_")
        found = {"DIGIT": letter.isdigit(), "SPACE": letter.isspace(), "WORD": letter.isalnum() or letter == "_"}
        return found[name.removeprefix("NOT_")] != name.startswith("NOT_")
    if kind is kinds.RANGE:
        return value[0] <= ord(letter) <= value[1]  # type: ignore[no-any-return]
    return kind is kinds.LITERAL and value == ord(letter)


def repeated(nodes: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """What comes before each part of a pattern that may be repeated, and a text that it describes."""
    for kind, value in nodes:
        if kind in REPEATS:
            inner = list(value[2])
            if value[1] > SIZE:
                units = letters(*inner[0]) if len(inner) == 1 else []
                yield from ((before, unit) for unit in units[:5] or [example(inner)])
            yield from repeated(inner, before)
        elif kind is kinds.BRANCH:
            for branch in value[1]:
                yield from repeated(branch, before)
                yield before, example(branch)
        elif kind in (kinds.SUBPATTERN, kinds.ATOMIC_GROUP):
            yield from repeated(value[3] if kind is kinds.SUBPATTERN else value, before)
        before += example([(kind, value)])


class Late(Exception):
    """A search takes seconds."""


@pytest.fixture
def alarm() -> Iterator[None]:
    """Ends searches that take exponential time."""

    def ring(*_: Any) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def search(pattern: re.Pattern[Any], text: Any, everywhere: bool) -> None:
    if everywhere:
        for _ in pattern.finditer(text):
            pass
    else:
        pattern.match(text)


@pytest.mark.usefixtures("alarm")
def test_all_patterns() -> None:
    """Each is tried on what its parts describe, again and again, with and without what comes before in the pattern."""
    slow, known = list[str](), patterns()
    assert {*AT_START, *SHORT} <= known.keys()
    for name, pattern in known.items():
        binary = isinstance(pattern.pattern, bytes)
        text = pattern.pattern.decode() if binary else pattern.pattern
        attacks = {*repeated(_parser.parse(text, 0 if binary else pattern.flags & ~re.UNICODE))}
        for before, unit in attacks if name not in SHORT else ():
            many = (unit or "a") * (SIZE // max(len(unit), 1))
            for tried in {f"{before}{many}\0", f"{many}\0", before * (SIZE // max(len(before), 1))}:
                started = time.thread_time()
                signal.setitimer(signal.ITIMER_REAL, 5)
                with suppress(Late):
                    search(
                        pattern,
                        tried.encode() if binary else tried,
                        not name.startswith("at start") and name not in AT_START,
                    )
                    signal.setitimer(signal.ITIMER_REAL, 0)
                if time.thread_time() - started > MAX_S:
                    slow.append(f"{name}: {before!r} and {unit!r}")
    assert not slow
