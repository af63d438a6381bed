"""Measurements of models that take long, saved in the user's cache folder as small JSON files."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from h2o_stream.resources import cache_folder

LONG_S = 0.5
"""Seconds that a measurement must take to be worth saving."""


def read_measurement(kind: str, key: str) -> Any:
    """What `save_measurement` saved; None if there is nothing, or nothing readable."""
    with suppress(OSError, ValueError):
        return json.loads(_path(kind, key).read_text())
    return None


def save_measurement(kind: str, key: str, value: Any) -> None:
    """Save a JSON value atomically; do nothing if the folder cannot be written.

    Args:
        kind: of measurement; names the folder.
        key: everything the value depends on.
        value: the result.
    """
    path = _path(kind, key)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(value))
        scratch.replace(path)


def _path(kind: str, key: str) -> Path:
    return cache_folder() / kind / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
