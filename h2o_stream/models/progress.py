"""How far the loading of a model has come, for whoever draws it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """A step of loading.

    Attributes:
        what: ``downloading``, ``reading``, ``packing`` or ``writing``.
        done: bytes that are behind us.
        total: bytes in all.
    """

    what: str
    done: int
    total: int


Listener = Callable[[Progress], None]
"""Told about progress, from the thread that loads. It must return at once.

It raises KeyboardInterrupt when the user has left: a loader that writes files calls it several times a second, and
removes what is half written when it raises.
"""


def ignore(progress: Progress) -> None:
    """The listener that does nothing."""
