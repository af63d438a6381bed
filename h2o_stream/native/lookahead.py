"""Tokens that are in the slots of a stream before they are said: guesses, which can be taken back. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar
from weakref import WeakMethod

import numpy
from numpy.typing import NDArray

from h2o_stream import config
from h2o_stream.cache.slot_cache import SlotCache
from h2o_stream.native.pointers import pointer
from h2o_stream.native.stepper import Stepper

Row = TypeVar("Row")
"""Logits [V] float32 of a token."""


class Passes(ABC, Generic[Row]):
    """Passes of one stream: a token and guesses go through the model together, as if one after another.

    The cache counts tokens as they are said; what else changes it, or reads all of it, takes the guesses back first.

    Attributes:
        tokens: the guesses that are in the slots.
    """

    def __init__(self, cache: SlotCache) -> None:
        self._cache = cache
        self.tokens: Sequence[int] = ()
        self._taken, self._begun = 0, False
        weak = WeakMethod(self.take_back)
        cache.take_back = lambda: (take_back := weak()) and take_back()

    def take(self, token: int, guesses: Sequence[int]) -> Row | None:
        """Take a token and what may follow it through the model, and count the token.

        Returns:
            [V] float32, logits after the token, valid until the next call; None where only a step can be taken, and
            nothing was touched.
        """
        self.take_back()
        ids = [token, *guesses[: self._max_guesses]]
        ids = ids[: self._cache.steps_ahead(len(ids))]
        if len(ids) < 2 or not (taken := self._begin(ids)):
            return None
        self.tokens, self._taken, self._begun = ids[1:taken], 0, True
        return self._count()

    def next(self, token: int) -> Row | None:
        """Count a token that is in the slots already: the logits [V] after it; None if it is not the one guessed."""
        if not self.tokens or self.tokens[0] != token:
            return None
        self.tokens, self._taken = self.tokens[1:], self._taken + 1
        return self._count()

    def take_back(self) -> None:
        """Bring the slots back to what was said, and recurrent states to where it ends."""
        if self._begun:
            count, self._begun, self.tokens = self._taken + 1 + len(self.tokens), False, ()
            self._keep(count, self._taken + 1)

    @property
    @abstractmethod
    def _max_guesses(self) -> int:
        """How many guesses a pass can have."""

    @abstractmethod
    def _begin(self, ids: Sequence[int]) -> int:
        """Take the first tokens through the model, and count none. Returns how many; 0: nothing was touched."""

    @abstractmethod
    def _keep(self, count: int, kept: int) -> None:
        """Take back those of the last pass's `count` tokens that come after the first ones."""

    @abstractmethod
    def _count(self) -> Row:
        """Count a token of the pass; the logits after it."""


class Lookahead(Passes[NDArray[numpy.float32]]):
    """Passes of a native stepper.

    Attributes:
        logits: [n, V] float32, for those after some tokens of a pass.
    """

    def __init__(self, stepper: Stepper) -> None:
        super().__init__(stepper.cache)
        self._stepper, self._native = stepper, stepper.native
        self._bytes_per_guess = 0
        self.logits = self._new_logits()

    def _begin(self, ids: Sequence[int]) -> int:
        self._cache.prepare(len(ids))
        rows = self._stepper.begin_pass(numpy.array(ids, numpy.int64))
        if rows is None:
            return 0
        with self._cache.writing():
            failed = self._native.h2o_pass(self._stepper.handle, rows.ctypes.data, len(rows), self._stepper.threads)
        if failed:  # out of memory
            return 0
        self._bytes_per_guess = self._native.h2o_pass_bytes(self._stepper.handle) // (len(ids) - 1)
        return len(ids)

    def _keep(self, count: int, kept: int) -> None:
        self._native.h2o_pass_keep(self._stepper.handle, kept, self._stepper.threads)

    def release(self) -> None:
        """Free what passes and steps have allocated."""
        self.take_back()
        self.logits = self._new_logits()
        self._stepper.reopen()

    @property
    def _max_guesses(self) -> int:
        """As many as the notes about them have room for; one before they are known."""
        if not self._bytes_per_guess:
            return 1
        limit = max(config.SPECULATED_BYTES, int(config.SPECULATED_SHARE * self._cache.counts().nbytes))
        return max((limit - self.logits[1:].nbytes) // self._bytes_per_guess, 1)

    def _new_logits(self) -> NDArray[numpy.float32]:
        """Memory that is not touched yet."""
        return numpy.empty((config.SPECULATED_LOGITS, self._stepper.model.struct.vocab_size), numpy.float32)

    def _count(self) -> NDArray[numpy.float32]:
        """Count a token of the pass; the logits after it, which are computed several at a time."""
        self._cache.prepare(1)
        self._stepper.end_step()
        place = self._taken % len(self.logits)
        if not place:
            count = min(1 + len(self.tokens), len(self.logits))
            logits = pointer(self.logits, "float32", self.logits.size)
            self._native.h2o_pass_logits(self._stepper.handle, self._taken, count, logits, self._stepper.threads)
        row: NDArray[numpy.float32] = self.logits[place]
        return row
