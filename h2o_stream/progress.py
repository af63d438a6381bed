"""What long work tells about how far it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far something has come. Whoever is told may raise KeyboardInterrupt to end it: nothing is left half done.

    Attributes:
        what: ``reading``, ``packing`` or ``measuring``.
        done: bytes; of ``measuring`` layers.
        total: the same.
    """

    what: str
    done: int
    total: int


def ignore(progress: Progress) -> None:
    """For work that nobody watches."""
