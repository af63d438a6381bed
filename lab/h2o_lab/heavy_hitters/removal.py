"""Tokens that are masked while a text is read: the heavy hitters, or as many at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_lab.masked.masking import Rule

REMOVED = ("heavy", "random", "heavy but the first", "random but the first")
"""Ways to choose what is removed."""

_FIRST, _NEWEST = 4, 32
"""First tokens that the last two ways leave, and newest tokens that every way leaves."""


@dataclass(frozen=True)
class Removal:
    """Tokens that are masked while a text is read: ``nothing`` or one of `REMOVED`, in percent of the tokens seen."""

    removed: str
    percent: int

    def __str__(self) -> str:
        return f"without {self.percent}% {self.removed}" if self.percent else "nothing removed"

    @property
    def rule(self) -> Rule | None:
        """See `MaskedStream`."""
        if not self.percent:
            return None
        by, _, rest = self.removed.partition(" ")
        return removal_rule(self.percent / 100, by, _FIRST if rest else 0, _NEWEST)


def removal_rule(fraction: float, by: str, spared: int, recent: int) -> Rule:
    """Tokens leave the sight of later queries for good, until they are `fraction` of all.

    The largest scores go (``heavy``), or any (``random``), except the first `spared` and the newest `recent`.
    """

    def choose(number: int, scores: Tensor, visible: Tensor) -> Tensor:
        seen = scores.shape[1]
        eligible = visible.clone()
        eligible[:, :spared] = eligible[:, max(seen - recent, 0) :] = False
        hidden = seen - int(visible[0].sum())
        count = min(max(round(fraction * seen) - hidden, 0), int(eligible[0].sum()))
        if by == "random":
            generator = torch.Generator().manual_seed(seen * 1009 + number)
            scores = torch.rand(scores.shape, generator=generator).to(scores.device)
        chosen = scores.masked_fill(~eligible, -torch.inf).topk(count, dim=-1).indices
        return visible.scatter(1, chosen, False)

    return choose
