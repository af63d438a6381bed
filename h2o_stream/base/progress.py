"""Progress of long operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Progress of an operation.

    Attributes:
        what: ``downloading``, ``reading``, ``packing``, ``writing`` or ``measuring``.
        done: bytes processed; layers for ``measuring``.
        total: bytes or layers in total.
    """

    what: str
    done: int
    total: int


ProgressCallback = Callable[[Progress], None]
"""Called from the working thread; must return immediately.

Raises KeyboardInterrupt to cancel. Code that writes files calls it several times per second, and removes partial files
if it raises.
"""


def ignore(_: Progress | str) -> None:
    """A callback for progress or notes that does nothing."""
