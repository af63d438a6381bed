"""Tells whoever works on a cache's tensors by address when the addresses, or the rules they were read with, change."""

from __future__ import annotations


class Revision:
    """A counter that the layers of a cache share.

    It grows when a tensor of a layer is allocated anew or released, and when anything else changes that stays the same
    from token to token: windows, pins, budgets, spans, rows.

    Attributes:
        version: how often that happened.
    """

    def __init__(self) -> None:
        self.version = 0

    def changed(self) -> None:
        """Whatever was bound to the tensors has to be bound again."""
        self.version += 1
