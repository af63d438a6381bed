"""What recall works on: passages of the stream, and the candidates among them for a message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["user", "assistant"]

Verdict = Literal["recalled", "still held", "loosely related", "repeated", "outdated", "said by the model", "no room"]
"""What was decided about a candidate.

``repeated``: a better one says the same; ``outdated``: a newer one replaces it.
"""


@dataclass(frozen=True)
class Passage:
    """Part of a turn, from token `start` of the stream to `stop`: a message, a paragraph of a reply, or a part of a
    long text.
    """

    turn: int
    role: Role
    text: str
    start: int
    stop: int


@dataclass(frozen=True)
class Candidate:
    """A passage that was found for a message, and what was decided about it.

    Attributes:
        excerpt: its sentences that are read again.
        score: how much of what the message asks for it covers, 0 to 1.
        terms: the words by which it was found; none if it says it in other words.
        held: share of the excerpt's tokens that the heads that copy still hold, 0 to 1.
        tokens: length of the excerpt.
    """

    passage: Passage
    excerpt: str
    score: float
    terms: tuple[str, ...]
    held: float
    tokens: int
    verdict: Verdict


@dataclass(frozen=True)
class Recalled:
    """The event before a reply for which passages are read again."""

    candidates: tuple[Candidate, ...]
