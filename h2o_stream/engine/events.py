"""The engine's events: plain data, with no knowledge of how it is displayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from h2o_stream.cache.counts import CacheCounts

Finish = Literal["stop", "length", "interrupted", "context", "oom"]


@dataclass(frozen=True)
class PrefillProgress:
    """Part of the prompt is in the cache.

    Attributes:
        done: prompt tokens fed so far.
    """

    done: int
    total: int
    elapsed_s: float
    counts: CacheCounts


@dataclass(frozen=True)
class Token:
    """A token was sampled and is in the cache.

    Attributes:
        text: the text it completes; empty while a character is incomplete.
        thinking: the text of the model's thinking that it completes; None for a token that is no part of it.
        passes: how many times tokens of the reply went through the model so far.
    """

    id: int
    text: str
    elapsed_s: float
    seen: int
    get_counts: Callable[[], CacheCounts] = field(repr=False, compare=False)
    thinking: str | None = None
    passes: int = 0

    @property
    def counts(self) -> CacheCounts:
        """The state of the cache, computed on access and valid until the next event."""
        return self.get_counts()


@dataclass(frozen=True)
class Finished:
    """A prefill was cut short, or a reply ended.

    Attributes:
        text: text held back as a possible start of a stop string, which turned out not to be one.
        detail: a line for the user if the reason is ``context`` or ``oom``.
        cut: a stop string ended the reply, so the cache has text that is no part of it.
    """

    reason: Finish
    text: str = ""
    detail: str = ""
    cut: bool = False
