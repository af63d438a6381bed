"""Reads what ``/set`` is given."""

from __future__ import annotations

from typing import Any, get_type_hints

from h2o_stream.config import SamplingConfig
from h2o_stream.errors import ConfigError

_ALIASES = {"temp": "temperature", "n": "max_tokens"}


def parse_setting(text: str) -> tuple[str, Any]:
    """A field of `SamplingConfig` and its value, perhaps out of range; raises ConfigError for another name or kind."""
    name, _, value = text.partition(" ")
    name, value = _ALIASES.get(name, name).replace("-", "_"), value.strip()
    hints = get_type_hints(SamplingConfig)
    if name not in hints:
        raise ConfigError(f"{name} cannot be set; /set takes one of {', '.join(hints)}")
    if name == "stop":
        return name, tuple(value.split()) if value else ()
    if not value:
        raise ConfigError(f"/set {name} needs a value")
    kind = float if "float" in str(hints[name]) else int
    try:
        return name, kind(value)
    except ValueError as error:
        raise ConfigError(f"{name} takes a number, not {value!r}") from error
