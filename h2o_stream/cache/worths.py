"""What tokens are worth to the heads that hold them, and the least that stays: computed when somebody asks.

Only then are the policies imported, and torch with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import numpy
from numpy.typing import NDArray

from h2o_stream.cache.slot_cache import SlotCache

Role = Literal["sink", "pinned", "recent", "heavy"]
"""Why a head keeps a token: only ``heavy`` ones have to be worth it."""

_ROLES: tuple[Role, ...] = ("sink", "pinned", "recent", "heavy")


@dataclass(frozen=True)
class Holding:
    """How some tokens are held.

    Attributes:
        heads: the heads that hold any of them, by number.
        roles: number of these heads by role.
        worth: mean worth of these tokens over the heads that hold them, protected ones included.
        least: the least that stays in these heads, see `Worths.least`.
    """

    heads: tuple[int, ...]
    roles: Mapping[Role, int]
    worth: float
    least: float


@dataclass(frozen=True)
class Worths:
    """The occupied slots of some heads, in the first row of a batch.

    Attributes:
        head: [n] int64, number of the head.
        token: [n] int64, token index.
        worth: [n] float32, see `Policy.worth`, as if nothing were protected.
        role: [n] int64, place in `_ROLES`.
    """

    num_heads: int
    head: NDArray[numpy.int64]
    token: NDArray[numpy.int64]
    worth: NDArray[numpy.float32]
    role: NDArray[numpy.int64]

    @classmethod
    def of(cls, cache: SlotCache, layer: int | None = None) -> Worths:
        """The worths in a cache as it is now: of one layer, or of all that follow the plan."""
        from h2o_stream.cache.eviction import worth_of_slots

        groups = cache.evicting_groups if layer is None else cache.groups_of(layer)
        none = numpy.empty(0, numpy.int64)
        found: list[tuple[NDArray[Any], ...]] = [(none, none, none.astype(numpy.float32), none)]  # recurrent layers
        count = 0
        for group in groups:
            if not group.is_initialized:
                continue
            worth, protected = (x[0].cpu().numpy() for x in worth_of_slots(group))
            index = group.token_indices[0].astype(numpy.int64)
            role = numpy.where(protected, _ROLES.index("recent"), _ROLES.index("heavy"))
            role[group.protection.pinned(index)] = _ROLES.index("pinned")
            role[index < group.protection.sinks] = _ROLES.index("sink")
            head = numpy.broadcast_to(numpy.arange(count, count + len(index))[:, None], index.shape)
            found.append(tuple(x[index >= 0] for x in (head, index, worth, role)))
            count += len(index)
        return cls(count, *(numpy.concatenate(parts) for parts in zip(*found, strict=True)))

    def holding(self, tokens: range) -> Holding | None:
        """How the tokens of a range are held; None if no head holds any."""
        inside = (self.token >= tokens.start) & (self.token < tokens.stop)
        if not inside.any():
            return None
        pairs = set(zip(self.head[inside].tolist(), self.role[inside].tolist(), strict=True))
        heads = tuple(sorted({head for head, _ in pairs}))
        roles = Counter(role for _, role in pairs)
        counts = {name: roles[number] for number, name in enumerate(_ROLES) if roles[number]}
        return Holding(heads, counts, float(self.worth[inside].mean()), self.least(heads))

    def least(self, heads: tuple[int, ...]) -> float:
        """The lowest worth of a heavy token in these heads, in the mean; of a recent one where none is heavy."""
        lowest = []
        for head in heads:
            mine = self.head == head
            for role in ("heavy", "recent"):
                candidates = self.worth[mine & (self.role == _ROLES.index(role))]
                if len(candidates):
                    lowest.append(float(candidates.min()))
                    break
        return fmean(lowest) if lowest else 0.0
