"""Logits on the host or on a device, and what a sampler wants of them. Knows no settings and imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float32]
TokenIds = NDArray[np.int64]

LOW_TEMPERATURE, HIGH_SCORE = 1e-3, 1e20
"""Beyond these, quotients of scores may not be numbers of float32: those of differences are."""

MIN_TEMPERATURE = 1e-20
"""Lower ones are taken for this: the likeliest token is certain long before, and float32 has quotients of logits."""

BANNED = -1e30
"""The score of a token that must not be sampled, unless a grammar leaves no other: below any logit, and finite."""


class Changes(NamedTuple):
    """What happens to the scores of some tokens: negative ones are multiplied by a factor, others divided.

    Attributes:
        ids: [n] in ascending order, each once.
        factors: [n] float32; so is `added`, which is added then.
        banned: [n], whether the token must not come next.
    """

    ids: TokenIds
    factors: Scores
    added: Scores
    banned: NDArray[np.bool_]

    @classmethod
    def none(cls, *ids: Sequence[int] | TokenIds) -> Self:
        """No change yet."""
        unique = np.unique(np.concatenate([np.array(some, np.int64) for some in ids]))
        zeros = np.zeros(len(unique), np.float32)
        return cls(unique, zeros + np.float32(1), zeros, zeros > 0)

    def places(self, ids: Sequence[int] | TokenIds) -> TokenIds:
        """Where some of the ids are."""
        return self.ids.searchsorted(np.array(ids, np.int64))


class Draw(NamedTuple):
    """How a token is drawn: what `candidates` goes by, and where in the mass of the candidates, 0 to 1."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    place: float


class DeviceLogits(Protocol):
    """Logits [V] on a device that can sample from them."""

    def sample(self, changes: Sequence[Changes | None], draw: Draw | None) -> tuple[int, float]:
        """The token after changes one after another, the likeliest one without `draw`; and the largest logit."""

    def copy(self) -> Self:
        """Logits that stay valid."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Scores:
        """The logits on the host."""


Logits: TypeAlias = Scores | DeviceLogits


def changed(scores: Any, factors: Any, added: Any, banned: Any, where: Callable[..., Any]) -> Any:
    """Scores [n] after `Changes`: arrays or tensors, with their `where`."""
    return where(banned, BANNED, where(scores < 0, scores * factors, scores / factors) + added)
