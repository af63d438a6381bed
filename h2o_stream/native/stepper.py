"""A native step of the whole model; see `h2o_stream.cache.forward.Stepper`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from h2o_stream.cache.forward import Stepper
    from h2o_stream.cache.window import H2OCache


def make_stepper(model: Any, cache: H2OCache) -> Stepper | None:
    """None: there is none yet."""
    return None
