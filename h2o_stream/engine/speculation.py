"""Guesses what a reply goes on with, from what was said before, and how many guesses pay.

Guesses are what followed the last tokens where the conversation had them before: the longest sequence, of these the
newest. What a grammar leaves is guessed first of all. Nothing depends on a guess but time: tokens
are sampled from the model's logits one after another, with and without.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy
from numpy.typing import NDArray

from h2o_stream.config import (
    MATCHED_TOKENS,
    MAX_COST_FACTOR,
    MIN_GAIN,
    PASS_COSTS,
    RIGHT_GUESSES,
    SEARCHED_TOKENS,
    SpeculateMode,
)
from h2o_stream.engine.logits import Logits
from h2o_stream.engine.served import Served


class Foresees(Protocol):
    """See `Matcher`."""

    sample: Sequence[int]

    def foresee(self, follow: Callable[[list[int]], Sequence[int]], most: int) -> list[int]:
        """Tokens that may come next."""


_LENGTHS = tuple(RIGHT_GUESSES)

_FORCED = MATCHED_TOKENS
"""The length that stands for what a grammar leaves."""

_NEWEST_TIME, _NEWEST_GUESS, _FORGOTTEN = 0.1, 0.02, 0.01
"""Weights in running averages: of the newest time, and of whether the newest guess was right. What is known of costs is
forgotten so much with every step that could have had guesses: otherwise guesses would never be made again."""

_COSTS = numpy.array(PASS_COSTS)


class Speculation:
    """The guesses of one engine, and what is known about them.

    Attributes:
        mode: ``auto`` guesses what pays, ``off`` nothing.
        passes: how many times tokens went through the model.
    """

    def __init__(self, mode: SpeculateMode) -> None:
        self.mode, self.passes = mode, 0
        self._right = [*RIGHT_GUESSES.values()]
        self._step_s, self._cost_factor = 0.0, 1.0
        self._expected: Sequence[int] = ()
        self._length = self._seen = 0

    def step(self, served: Served, tokens: NDArray[numpy.int32], most: int, matcher: Foresees | None = None) -> Logits:
        """Take the last of some tokens through the model, perhaps with guesses, unless it was guessed before.

        Args:
            served: the model.
            tokens: [n] all tokens of the conversation.
            most: guesses that can be of use, at most.
            matcher: of the grammar, if the reply has one.

        Returns:
            [V] logits after the last token.
        """
        if len(tokens) == self._seen + 1:
            self._learn(int(tokens[-1]))
        else:
            self._expected = ()
        self._seen = len(tokens)
        started = time.perf_counter()

        def guess() -> Sequence[int]:
            nonlocal started
            if self.mode == "off":
                return ()
            self._expect(tokens[-SEARCHED_TOKENS:], matcher)
            guesses = self._expected[: self._count(min(most, len(self._expected)))]
            started = time.perf_counter()
            return guesses

        logits, taken = served.step(int(tokens[-1]), guess)
        if taken:
            self.passes += 1
            self._measure(taken, time.perf_counter() - started)
        return logits

    def _learn(self, token: int) -> None:
        """Note whether the token was the expected one."""
        if not self._expected:
            return
        right, place = self._expected[0] == token, bisect_right(_LENGTHS, self._length) - 1
        self._right[place] += _NEWEST_GUESS * (right - self._right[place])
        self._expected = self._expected[1:] if right else ()
        self._length = min(self._length + 1, MATCHED_TOKENS)

    def _expect(self, tokens: NDArray[numpy.int32], matcher: Foresees | None) -> None:
        """Look for what follows, unless it is known."""
        if self._expected:
            return
        if matcher is None:
            self._expected, self._length = followers(tokens)
            return
        self._length, sample = _FORCED, numpy.array(matcher.sample, numpy.int32)

        def follow(guessed: list[int]) -> list[int]:
            following, length = followers(numpy.concatenate([sample, tokens, numpy.array(guessed, numpy.int32)]), 1)
            self._length = self._length if guessed else length
            return following

        self._expected = matcher.foresee(follow, len(PASS_COSTS))

    def _count(self, most: int) -> int:
        """How many guesses pay, 0 to `most`."""
        if not most or not self._step_s:
            return 0
        right = self._right[bisect_right(_LENGTHS, self._length) - 1]
        gains = (1 + numpy.cumsum(right ** numpy.arange(1, most + 1))) / (1 + self._cost_factor * (_COSTS[:most] - 1))
        best = int(gains.argmax())
        if gains[best] >= MIN_GAIN:
            return best + 1
        self._cost_factor += _FORGOTTEN * (1 - self._cost_factor)
        return 0

    def _measure(self, taken: int, seconds: float) -> None:
        if taken == 1:
            self._step_s += (_NEWEST_TIME if self._step_s else 1) * (seconds - self._step_s)
        elif self._step_s:
            factor = (seconds / self._step_s - 1) / (PASS_COSTS[taken - 2] - 1)
            self._cost_factor += _NEWEST_TIME * (min(max(factor, 0.0), MAX_COST_FACTOR) - self._cost_factor)


def followers(tokens: NDArray[numpy.int32], least: int = 2) -> tuple[list[int], int]:
    """What followed the longest sequence with which tokens [n] end, the newest time; and its length.

    Nothing and 0 if there was none of the least length.
    """
    last = len(tokens) - 1
    ends, length = numpy.flatnonzero(tokens[:last] == tokens[last]), 1
    while length < MATCHED_TOKENS:
        longer = ends[ends >= length]
        longer = longer[tokens[longer - length] == tokens[last - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if length < least or not len(ends):
        return [], 0
    following = ends[-1] + 1
    return tokens[following : following + len(PASS_COSTS)].tolist(), length
