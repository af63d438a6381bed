"""How recalled excerpts are put in front of a message."""

from __future__ import annotations

from collections.abc import Sequence

from h2o_stream.recall.passage import Candidate


def compose(candidates: Sequence[Candidate], message: str) -> str:
    """The user's turn: the excerpts of the candidates, then the message, verbatim. Without candidates, the message."""
    if not candidates:
        return message
    excerpts = " ".join(" ".join(candidate.excerpt.split()) for candidate in candidates)
    return f"Context from earlier: {excerpts}\n\nQuestion: {message}"
