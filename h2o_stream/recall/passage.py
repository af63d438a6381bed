"""What recall works on: passages of the stream, and the candidates among them for a message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["user", "assistant"]

SaidTurn = tuple[int, str, str]
"""Number of a turn, the user's message and the reply."""

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
        sure: whether it is likely to say what is asked for.
    """

    passage: Passage
    excerpt: str
    score: float
    terms: tuple[str, ...]
    held: float
    tokens: int
    verdict: Verdict
    sure: bool = True


@dataclass(frozen=True)
class Whole:
    """What a message asks for as a whole.

    Attributes:
        name: name that the message uses.
        turn: turn in which it was given; 0 if it never was.
        role: who gave it.
        text: text of the whole.
        rest: what else the message asks for, if a passage may answer it; empty if it needs all.
        start: its first token in the stream.
        stop: the one after its last.
        held: share of its tokens that the heads that copy still hold, 0 to 1.
    """

    name: str
    turn: int = 0
    role: Role = "user"
    text: str = ""
    rest: str = ""
    start: int = 0
    stop: int = 0
    held: float = 0.0


Gone = Literal["", "never given", "off", "too long"]
"""Why a whole is not read again; empty if it is."""


@dataclass(frozen=True)
class Recalled:
    """The event before a reply for which passages are read again, or something that is gone as a whole.

    Attributes:
        candidates: the passages, or the pieces of the whole.
        whole: what the message asks for and the cache no longer has; None if it asks for passages.
        gone: why it is not read again.
    """

    candidates: tuple[Candidate, ...]
    whole: Whole | None = None
    gone: Gone = ""

    @property
    def pieces(self) -> tuple[Candidate, ...]:
        """The pieces of a whole that is longer than what can be read at once."""
        return self.candidates if self.whole and not self.gone and len(self.candidates) > 1 else ()
