"""Native code for one layer; see `h2o_stream.cache.slots.Kernels`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from h2o_stream.cache.slots import Kernels


def make_kernels() -> Kernels | None:
    """None: there are none yet."""
    return None
