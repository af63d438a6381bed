"""Decides which of two readings of a model is right: the one that predicts plain text better."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy
from numpy.typing import NDArray

Side = Literal["file", "transformers", ""]

LINES = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "Once upon a time, there was a little girl who lived in a small house near the forest.",
    "Water freezes at zero degrees and boils at one hundred degrees.",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.",
    "If it rains tomorrow, we will stay at home and read a book.",
    "for i in range(10):\n    print(i)",
    "The sun rises in the east and sets in the west.",
    "She opened the door, looked around the room, and sat down at the table.",
    "one two three four five six seven eight nine ten",
    "In the year 1969, the first man walked on the surface of the moon.",
    "Thank you very much for your help. I am looking forward to hearing from you.",
    "To be, or not to be, that is the question.",
)
"""Text that every model that was trained on text knows something of; each line is a stream of its own."""

_CLEARLY = 5.0
"""By so many standard errors must lines be likelier in one reading than in the other: nothing else tells them apart,
and models with random weights differ by chance."""

_LEAST = 0.1
"""And by so many nats per line, which rounding does not reach."""

Loss = Callable[[str], float]
"""The negative log-likelihood of a line in nats."""


def clearly_better(file: Loss, transformers: Loss, lines: Iterable[str] | None = None) -> Side:
    """Which of two readings predicts text clearly better; neither if that is not clear."""
    losses = [(file(line), transformers(line)) for line in (LINES if lines is None else lines)]
    gains = numpy.array([theirs - ours for ours, theirs in losses], numpy.float64)
    if not numpy.isfinite(gains).all():
        finite = numpy.isfinite(numpy.array(losses)).all(0)
        return "file" if finite[0] and not finite[1] else "transformers" if finite[1] and not finite[0] else ""
    mean, error = float(gains.mean()), float(gains.std(ddof=1)) / len(gains) ** 0.5
    if not abs(mean) > max(_LEAST, _CLEARLY * error):
        return ""
    return "file" if mean > 0 else "transformers"


def loss_of(ids: Sequence[int], logits: NDArray[Any]) -> float:
    """The loss in nats of all tokens [n] but the first, by the logits [n - 1, V] after the others."""
    logits = logits.astype(numpy.float64)
    highest = logits.max(-1, keepdims=True)
    likelihoods = logits - highest - numpy.log(numpy.exp(logits - highest).sum(-1, keepdims=True))
    return -float(likelihoods[numpy.arange(len(ids) - 1), list(ids[1:])].sum())
