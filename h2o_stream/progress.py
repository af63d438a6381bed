"""What long work tells about how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far something has come.

    Attributes:
        what: ``downloading``, ``reading``, ``packing``, ``writing`` or ``measuring``.
        done: bytes that are behind us; of ``measuring`` layers.
        total: bytes in all, or layers.
    """

    what: str
    done: int
    total: int


ProgressCallback = Callable[[Progress], None]
"""Told about progress, from the thread that works. It must return at once.

It raises KeyboardInterrupt when the user has left: whoever writes files calls it several times a second, and removes
what is half written when it raises.
"""


def ignore(progress: Progress) -> None:
    """The listener that does nothing."""
