"""What the engine reports while it works. Plain data: whoever draws decides how it looks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from h2o_stream.cache.counts import CacheCounts

Finish = Literal["stop", "length", "interrupted", "context", "oom"]


@dataclass(frozen=True)
class PrefillProgress:
    """A part of the prompt is in the cache.

    Attributes:
        done: prompt tokens fed so far.
        total: prompt tokens of this turn.
        elapsed_s: seconds of work on this prompt.
        counts: where the tokens are.
    """

    done: int
    total: int
    elapsed_s: float
    counts: CacheCounts


@dataclass(frozen=True)
class Token:
    """One token was drawn and is in the cache.

    Attributes:
        id: of the vocabulary.
        text: what became readable with it; empty while a character is incomplete.
        elapsed_s: seconds of work on this reply.
        seen: tokens fed since the start of the stream.
        count: counts where the tokens are, see `counts`.
    """

    id: int
    text: str
    elapsed_s: float
    seen: int
    count: Callable[[], CacheCounts] = field(repr=False, compare=False)

    @property
    def counts(self) -> CacheCounts:
        """Where the tokens are, counted when asked for: it is right until the next event."""
        return self.count()


@dataclass(frozen=True)
class Finished:
    """A prefill or a reply came to its end before or after its last token.

    Attributes:
        reason: why.
        text: what was held back as the possible start of a stop string and is now known not to be one.
        detail: a line for the user when the reason is ``context`` or ``oom``.
    """

    reason: Finish
    text: str = ""
    detail: str = ""
