"""What a loader tells about how far it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far loading has come. Whoever is told may raise KeyboardInterrupt to end it: nothing is left half done.

    Attributes:
        what: ``reading``, ``packing`` or ``writing``.
        done: bytes.
        total: bytes.
    """

    what: str
    done: int
    total: int
