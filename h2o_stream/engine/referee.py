"""Decides which of two readings of a model is right: the one that predicts plain text better."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import numpy
from numpy.typing import NDArray

Side = Literal["file", "transformers", ""]

LINES = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do:",
    "once or twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it,",
    '"and what is the use of a book," thought Alice, "without pictures or conversations?"',
    "So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy),",
    "whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the daisies,",
    "when suddenly a White Rabbit with pink eyes ran close by her.",
    "There was nothing so very remarkable in that; nor did Alice think it so very much out of the way",
    'to hear the Rabbit say to itself, "Oh dear! Oh dear! I shall be late!"',
    "(when she thought it over afterwards, it occurred to her that she ought to have wondered at this,",
    "but at the time it all seemed quite natural);",
    "but when the Rabbit actually took a watch out of its waistcoat-pocket, and looked at it, and then hurried on,",
    "Alice started to her feet, for it flashed across her mind",
    "that she had never before seen a rabbit with either a waistcoat-pocket, or a watch to take out of it,",
    "and burning with curiosity, she ran across the field after it, and fortunately was just in time",
    "to see it pop down a large rabbit-hole under the hedge.",
    "In another moment down went Alice after it, never once considering how in the world she was to get out again.",
)
"""A text that models of many languages know."""

_CLEARLY = 4.0
"""By so many standard errors must lines be likelier in one reading than in the other: models with random weights differ
by chance."""

_LEAST = 0.02
"""And by this share of their loss, which rounding does not reach."""


_KNOWN = 0.75
"""The better reading must lose less than this share of what a guess among all tokens loses: it knows such text."""


class Reading(NamedTuple):
    """A model as it was read.

    Attributes:
        tokenize: a text, and whether it begins a stream, to token ids.
        losses: of tokens [n], the negative log-likelihoods [n - 1] of all but the first, in nats.
        context: how many tokens it takes.
        vocabulary: tokens that it chooses among.
    """

    tokenize: Callable[[str, bool], list[int]]
    losses: Callable[[list[int]], NDArray[Any]]
    context: int
    vocabulary: int


def clearly_better(file: Reading, transformers: Reading) -> Side:
    """Which of two readings predicts a text clearly better; neither if that is not clear."""
    (ours, tokens), (theirs, others) = (line_losses(reading, LINES) for reading in (file, transformers))
    count = min(len(ours), len(theirs))
    finite = [bool(numpy.isfinite(losses).all()) for losses in (ours, theirs)]
    if not all(finite) or count < 2:
        return "" if finite[0] == finite[1] else "file" if finite[0] else "transformers"
    gains = theirs[:count] - ours[:count]
    mean, error = float(gains.mean()), float(gains.std(ddof=1)) / count**0.5
    guess = _KNOWN * math.log(file.vocabulary)
    knows = min(ours.sum() / max(1, tokens), theirs.sum() / max(1, others)) < guess
    if not knows or not abs(mean) > max(_LEAST * float(ours[:count].mean()), _CLEARLY * error):
        return ""
    return "file" if mean > 0 else "transformers"


def line_losses(reading: Reading, lines: Iterable[str]) -> tuple[NDArray[Any], int]:
    """The loss of each line after those before it, in nats, as far as the context reaches; and the number of tokens."""
    ids, ends = list[int](), [0]
    for line in lines:
        new = reading.tokenize(f"{line}\n", not ids)
        if len(ids) + len(new) > reading.context:
            break
        ids += new
        ends.append(len(ids))
    losses = numpy.concatenate(([0.0], reading.losses(ids))) if len(ids) > 1 else numpy.zeros(len(ids))
    sums = numpy.array([0.0, *accumulate(losses)])
    differences: NDArray[Any] = numpy.diff(sums[ends])
    return differences, len(ids)


def loss(token: int, logits: NDArray[Any]) -> float:
    """The negative log-likelihood of a token by logits [V], in nats."""
    numbers = logits.astype(numpy.float64)
    highest = numbers.max()
    return float(highest + numpy.log(numpy.exp(numbers - highest).sum()) - numbers[token])


def step_losses(step: Callable[[Sequence[int]], NDArray[Any]], ids: list[int]) -> NDArray[Any]:
    """`Reading.losses` of a forward from the next tokens of a stream to the logits [V] after the last."""
    return numpy.array([loss(after, step([token])) for token, after in pairwise(ids)])
