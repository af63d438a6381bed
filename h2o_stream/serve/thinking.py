"""Whether the model is to think before it answers, by the fields in which clients say so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from h2o_stream.config import THINKING_VARIABLES
from h2o_stream.serve.errors import wrong

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
"""Only the first one switches thinking: most models cannot choose how much they think."""

_SWITCHES = ("think", "enable_thinking")


def parse_thinking(body: Mapping[str, Any], default: bool | None) -> bool | None:
    """What a request says: ``think``, ``enable_thinking``, either in ``chat_template_kwargs``, or an effort of none.

    Raises:
        ApiError: a field is wrong, or contradicts another one.
    """
    said = dict(_said(body))
    if len({*said.values()}) > 1:
        raise wrong(" and ".join(said), [*said.values()], "the same in all of them")
    return next(iter(said.values()), default)


def _said(body: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    for name in _SWITCHES:
        yield from _switched(name, body.get(name))
    yield from _effort("reasoning_effort", body.get("reasoning_effort"))
    yield from _effort("reasoning.effort", _object("reasoning", body).get("effort"))
    for name, value in _object("chat_template_kwargs", body).items():
        place = f"chat_template_kwargs.{name}"
        if name == "reasoning_effort":
            yield from _effort(place, value)
        elif name in THINKING_VARIABLES:
            yield from _switched(place, value, type(THINKING_VARIABLES[name][0]))
        elif value is not None:
            raise wrong(place, value, f"one of {', '.join(THINKING_VARIABLES)}, reasoning_effort")


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


def _effort(place: str, value: Any) -> Iterator[tuple[str, bool]]:
    if value is not None and value not in _EFFORTS:
        raise wrong(place, value, ", ".join(_EFFORTS))
    if value == _EFFORTS[0]:
        yield place, False
