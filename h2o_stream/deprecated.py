"""Deprecated public names, kept for one version."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _NoGraphs:
    """Stand-in for the former result of `compiled`."""

    patient = False
    trouble = ""

    def wait(self) -> None:
        """Do nothing."""

    def look(self) -> None:
        """Do nothing."""


@contextmanager
def compiled(model: Any, cache: Any, artifacts: Any = None) -> Iterator[_NoGraphs]:
    """Do nothing: `attach` already uses native code where possible."""
    warnings.warn(
        "compiled() no longer does anything: attach(model) is fast without it", DeprecationWarning, stacklevel=3
    )
    yield _NoGraphs()
