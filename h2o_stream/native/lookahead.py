"""Tokens that are in the slots of a stream before they are said: guesses, which can be taken back. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakMethod

import numpy
from numpy.typing import NDArray

from h2o_stream import config
from h2o_stream.native.pointers import pointer
from h2o_stream.native.stepper import Stepper


class Lookahead:
    """Passes of one stream: a token and guesses go through the model together, as if one after another.

    The cache counts tokens as they are said; what else changes it, or reads all of it, takes the guesses back first.

    Attributes:
        tokens: the guesses that are in the slots.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._stepper, self._native, self._cache = stepper, stepper.native, stepper.cache
        self._journal: int | None = None
        self.tokens: Sequence[int] = ()
        self._taken, self._bytes_per_guess = 0, 0
        self._logits = numpy.empty((0, stepper.model.struct.vocab_size), numpy.float32)
        mixes = any(layer.mixer for layer in stepper.model.description.layers)
        self.why_not = "recurrent states are not taken back" if mixes else ""
        weak = WeakMethod(self.take_back)
        stepper.cache.take_back = lambda: (take_back := weak()) and take_back()

    def __del__(self) -> None:
        if getattr(self, "_journal", None):
            self._native.h2o_journal_close(self._journal)

    def take(self, token: int, guesses: Sequence[int]) -> NDArray[numpy.float32] | None:
        """Take a token and what may follow it through the model, and count the token.

        Returns:
            [V] float32, logits after the token; None where only a step can be taken, and nothing was touched.
        """
        self.take_back()
        ids = [token, *guesses[: self._most_guesses]]
        ids = ids[: self._cache.steps_ahead(len(ids))]
        if len(ids) < 2 or self.why_not:
            return None
        self._cache.prepare(len(ids))
        rows = self._stepper.begin_pass(numpy.array(ids, numpy.int64))
        if rows is None:
            return None
        self._journal = self._journal or self._native.h2o_journal_open()
        if self._journal is None:
            return None
        if len(self._logits) < len(ids):
            self._logits = numpy.empty((len(ids), self._logits.shape[1]), numpy.float32)
        with self._cache.writing():
            failed = self._native.h2o_pass(
                self._stepper.handle,
                rows.ctypes.data,
                len(rows),
                pointer(self._logits, "float32", self._logits.size),
                self._journal,
                self._stepper.threads,
            )
        if failed:  # out of memory
            return None
        noted = self._native.h2o_journal_bytes(self._journal)
        self._bytes_per_guess = noted // (len(ids) - 1) + self._logits[0].nbytes
        self.tokens, self._taken = ids[1:], 0
        return self._count()

    def next(self, token: int) -> NDArray[numpy.float32] | None:
        """Count a token that is in the slots already: the logits [V] after it; None if it is not the one guessed."""
        if not self.tokens or self.tokens[0] != token:
            return None
        self.tokens, self._taken = self.tokens[1:], self._taken + 1
        return self._count()

    def take_back(self) -> None:
        """Bring the slots back to what was said."""
        if self.tokens:
            self._native.h2o_journal_undo(self._journal, self._taken + 1)
            self.tokens = ()

    def release(self) -> None:
        """Free what passes and steps have allocated."""
        self.take_back()
        if self._journal is not None:
            self._native.h2o_journal_close(self._journal)
            self._journal, self._logits = None, self._logits[:0].copy()
            self._stepper.reopen()

    @property
    def _most_guesses(self) -> int:
        """As many as the notes about them have room for; one before they are known."""
        share = config.SPECULATED_SHARE * self._cache.counts().nbytes
        return int(max(config.SPECULATED_BYTES, share)) // self._bytes_per_guess if self._bytes_per_guess else 1

    def _count(self) -> NDArray[numpy.float32]:
        self._cache.prepare(1)
        self._stepper.end_step()
        logits: NDArray[numpy.float32] = self._logits[self._taken].copy()
        return logits
