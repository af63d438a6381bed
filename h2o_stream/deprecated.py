"""Public names of earlier versions, for one version."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _NoGraphs:
    """Looks like what `compiled` used to give."""

    patient = False
    trouble = ""

    def wait(self) -> None:
        """Nothing is being made."""

    def look(self) -> None:
        """Nothing is being made."""


@contextmanager
def compiled(model: Any, cache: Any, artifacts: Any = None) -> Iterator[_NoGraphs]:
    """Do nothing: `attach` runs native code where there is any."""
    warnings.warn("compiled() does nothing any more: attach(model) is fast by itself", DeprecationWarning, stacklevel=3)
    yield _NoGraphs()
