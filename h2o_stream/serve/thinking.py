"""Whether the model is to think before it answers and how much, by the fields in which clients say so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from h2o_stream.config import EFFORT_VARIABLE, THINKING_VARIABLES
from h2o_stream.serve.errors import wrong

T = TypeVar("T")

_EFFORTS: Mapping[str, str | None] = {
    "none": None, "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high",
}  # fmt: skip
"""What templates know of the efforts that clients ask for. The first one switches thinking off."""

_SWITCHES = ("think", "enable_thinking")
_BUDGET = "thinking_budget"
"""The variable of a template that takes a number of tokens; -1 is no limit."""


def parse_thinking(body: Mapping[str, Any], default: bool | None) -> bool | None:
    """What a request says: ``think``, ``enable_thinking``, either in ``chat_template_kwargs``, or an effort of none.

    Raises:
        ApiError: a field is wrong, or contradicts another one.
    """
    return _agreed(_said(body), default)


def parse_effort(body: Mapping[str, Any]) -> str | None:
    """How much the model is to think, as templates know it; None if the request does not say.

    Raises:
        ApiError: see `parse_thinking`.
    """
    return _agreed([(place, effort) for place, value in _efforts(body) if (effort := _EFFORTS[value])], None)


def parse_budget(body: Mapping[str, Any]) -> int | None:
    """After how many tokens thinking is ended; None for no limit.

    Raises:
        ApiError: see `parse_thinking`.
    """
    given = {"thinking_budget_tokens": body.get("thinking_budget_tokens")}
    given[f"chat_template_kwargs.{_BUDGET}"] = _object("chat_template_kwargs", body).get(_BUDGET)
    for name, value in given.items():
        if value is not None and (type(value) is not int or value < -1):
            raise wrong(name, value, "a number of tokens, or -1 for no limit")
    budget = _agreed([(name, value) for name, value in given.items() if value is not None], -1)
    return None if budget == -1 else budget


def _agreed(given: Iterable[tuple[str, T]], default: T | None) -> T | None:
    """What all fields say; the default if there are none."""
    found = dict(given)
    if len({*found.values()}) > 1:
        raise wrong(" and ".join(found), [*found.values()], "the same in all of them")
    return next(iter(found.values()), default)


def _said(body: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    for name in _SWITCHES:
        if name != "think" or not isinstance(body.get(name), str):
            yield from _switched(name, body.get(name))
    for place, value in _efforts(body):
        if _EFFORTS[value] is None:
            yield place, False
    for name, value in _object("chat_template_kwargs", body).items():
        place = f"chat_template_kwargs.{name}"
        if name in THINKING_VARIABLES:
            yield from _switched(place, value, type(THINKING_VARIABLES[name][0]))
        elif value is not None and name != EFFORT_VARIABLE:
            raise wrong(place, value, f"one of {', '.join(THINKING_VARIABLES)}, {EFFORT_VARIABLE}")


def _efforts(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The efforts of a request, by their fields; ollama has them in ``think``."""
    think = body.get("think")
    given = {
        "think": think if isinstance(think, str) else None,
        "reasoning_effort": body.get("reasoning_effort"),
        "reasoning.effort": _object("reasoning", body).get("effort"),
        f"chat_template_kwargs.{EFFORT_VARIABLE}": _object("chat_template_kwargs", body).get(EFFORT_VARIABLE),
    }
    for place, value in given.items():
        if value is not None:
            if not isinstance(value, str) or value not in _EFFORTS:
                raise wrong(place, value, ", ".join(_EFFORTS))
            yield place, value


def _object(name: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise wrong(name, value, "an object")
    return value or {}


def _switched(place: str, value: Any, kind: type = bool) -> Iterator[tuple[str, bool]]:
    if value is None:
        return
    if type(value) is not kind:
        raise wrong(place, value, "true or false" if kind is bool else "a number of tokens")
    yield place, bool(value)
