"""Measurements of models that take long, saved in the user's cache folder as small JSON files."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from h2o_stream.base.json_text import parse_json
from h2o_stream.base.resources import atomic_file, cache_folder, remove_oldest

LONG_S = 0.5
"""Seconds that a measurement must take to be worth saving."""

MAX_SAVED = 300
"""Measurements of a kind that are kept; saving one more removes the one that was used longest ago."""


def read_measurement(kind: str, key: str) -> Any:
    """What `save_measurement` saved; None if there is nothing, or nothing readable."""
    try:
        path = _path(kind, key)
        value = parse_json(path.read_text())
    except (OSError, ValueError):
        return None
    with suppress(OSError):
        os.utime(path)  # what is used is not among the oldest
    return value


def save_measurement(kind: str, key: str, value: Any) -> None:
    """Save a JSON value atomically, by its kind and all that it depends on; nothing if the folder is not writable."""
    with suppress(OSError):
        path = _path(kind, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path, sync=False) as file:
            file.write(json.dumps(value).encode())
        remove_oldest(path.parent, "*", MAX_SAVED)


def _path(kind: str, key: str) -> Path:
    return cache_folder() / kind / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
