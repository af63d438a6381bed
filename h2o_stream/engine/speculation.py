"""Guesses what a reply goes on with, from what was said before, and how many guesses pay.

Guesses are what followed the last tokens where the conversation had them before: the longest sequence, of these the
newest. What a grammar leaves is guessed first of all. Nothing depends on a guess but time: tokens
are sampled from the model's logits one after another, with and without.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import merge
from typing import TYPE_CHECKING

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
from h2o_stream.engine.grammar import Guess, Matcher

if TYPE_CHECKING:
    from h2o_stream.engine.logits import Logits
    from h2o_stream.engine.served import Served

_LENGTHS = tuple(RIGHT_GUESSES)

_CANDIDATES = 4
"""Places of each length where what follows is looked up."""

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
        self._taken, self._seconds = 0, 0.0  # of the last pass, with the logits that were computed since
        self._expected: Sequence[Guess] = ()
        self._seen = 0

    def step(
        self, served: Served, tokens: NDArray[numpy.int32], max_guesses: int, matcher: Matcher | None = None
    ) -> Logits:
        """Take the last of some tokens through the model, perhaps with guesses, unless it was guessed before.

        Args:
            served: the model.
            tokens: [n] all tokens of the conversation.
            max_guesses: guesses that can be of use, at most.
            matcher: the matcher of the reply's grammar, if it has one.

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
            guesses = [guess.token for guess in self._expected[: self._count(min(max_guesses, len(self._expected)))]]
            started = time.perf_counter()
            return guesses

        logits, taken = served.step(int(tokens[-1]), guess)
        if taken:
            self.passes += 1
            self._measure(served.pass_s)
            self._taken, self._seconds = taken, 0.0
        self._seconds += time.perf_counter() - started
        return logits

    def _learn(self, token: int) -> None:
        """Note whether the token was the expected one."""
        if not self._expected:
            return
        guess, place = self._expected[0], _place(self._expected[0])
        right = guess.token == token
        self._right[place] += _NEWEST_GUESS * (right - self._right[place])
        self._expected = self._expected[1:] if right else ()

    def _expect(self, tokens: NDArray[numpy.int32], matcher: Matcher | None) -> None:
        """Look for what follows, unless it is known."""
        if self._expected:
            return
        if matcher is None:
            self._expected = next(followers(tokens), ())
            return
        self._expected = foresee(matcher, tokens)

    def _count(self, max_guesses: int) -> int:
        """How many guesses pay, 0 to `max_guesses`."""
        if not max_guesses or not self._step_s:
            return 0
        right = numpy.cumprod([self._right[_place(guess)] for guess in self._expected[:max_guesses]])
        gains = (1 + right.cumsum()) / (1 + self._cost_factor * (_COSTS[:max_guesses] - 1))
        best = int(gains.argmax())
        if gains[best] >= MIN_GAIN:
            return best + 1
        self._cost_factor += _FORGOTTEN * (1 - self._cost_factor)
        return 0

    def _measure(self, device_s: float | None) -> None:
        if device_s is not None:
            self._seconds = device_s
        if self._taken == 1:
            self._step_s += (_NEWEST_TIME if self._step_s else 1) * (self._seconds - self._step_s)
        elif self._taken and self._step_s:
            factor = (self._seconds / self._step_s - 1) / (PASS_COSTS[self._taken - 2] - 1)
            self._cost_factor += _NEWEST_TIME * (min(max(factor, 0.0), MAX_COST_FACTOR) - self._cost_factor)


def foresee(matcher: Matcher, tokens: NDArray[numpy.int32]) -> list[Guess]:
    """What may follow tokens [n] where a grammar has a say: as there, or in the grammar's sample."""
    sample = numpy.array(matcher.sample.tokens[:-1], numpy.int32)

    def follow(guesses: Sequence[Guess]) -> Iterator[list[Guess]]:
        guessed = numpy.array([guess.token for guess in guesses], numpy.int32)
        before = followers(numpy.concatenate([tokens, guessed]), 1)
        written = followers(numpy.concatenate([sample, tokens[-MATCHED_TOKENS:], guessed]), 1)
        return merge(before, written, key=lambda likely: -likely[0].length)

    return matcher.foresee(follow, len(PASS_COSTS))


def _place(guess: Guess) -> int:
    """Where it is counted whether such guesses are right."""
    return bisect_right(_LENGTHS, guess.length) - 1


def followers(tokens: NDArray[numpy.int32], least: int = 2) -> Iterator[list[Guess]]:
    """What followed sequences of at least so many tokens with which tokens [n] end: the longest and newest first, and
    others that begin otherwise.
    """
    last, begun = len(tokens) - 1, set[int]()
    ends = [numpy.flatnonzero(tokens[:last] == tokens[last])]
    while len(ends[-1]) and len(ends) < MATCHED_TOKENS:
        longer = ends[-1][ends[-1] >= len(ends)]
        ends.append(longer[tokens[longer - len(ends)] == tokens[last - len(ends)]])
    for length in range(len(ends), least - 1, -1):
        for end in ends[length - 1][: -1 - _CANDIDATES : -1]:
            following = tokens[end + 1 : end + 1 + len(PASS_COSTS)].tolist()
            if following[0] not in begun:
                begun.add(following[0])
                yield [Guess(token, min(length + i, MATCHED_TOKENS)) for i, token in enumerate(following)]
