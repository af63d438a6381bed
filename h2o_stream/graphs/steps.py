"""To be deleted as soon as nothing imports it any more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from h2o_stream.deprecated import _NoGraphs


@contextmanager
def compiled(model: Any, cache: Any, artifacts: Any = None) -> Iterator[Any]:
    """Do nothing."""
    yield _NoGraphs()
