"""Deprecated public names, kept for one version."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any


@contextmanager
def compiled(model: Any, cache: Any, artifacts: Any = None) -> Iterator[SimpleNamespace]:
    """Do nothing: `attach` already uses native code where possible."""
    warnings.warn(
        "compiled() no longer does anything: attach(model) is fast without it", DeprecationWarning, stacklevel=3
    )
    yield SimpleNamespace(patient=False, trouble="", wait=lambda: None, look=lambda: None)
