"""Reads JSON from outside."""

from __future__ import annotations

import json
from typing import Any

_MAX_DEPTH = 100
"""Levels of a value; other parsers have limits of this kind for what repeats it."""


def parse_json(text: str | bytes) -> Any:
    """The value of a text; raises ValueError if it is no JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_depth(value: Any) -> None:
    """Raise ValueError if a JSON value has more levels than whoever goes through it can take."""
    level: list[Any] = [[value]]
    for _ in range(_MAX_DEPTH):
        inside = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inside for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise ValueError(f"it is more than {_MAX_DEPTH} levels deep")
