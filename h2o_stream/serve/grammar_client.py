"""The other end of `grammar_process`: a grammar in a process of its own, and the replies that follow it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

from h2o_stream.base.processes import yield_to_others
from h2o_stream.errors import DataError
from h2o_stream.serve.errors import ApiError
from h2o_stream.serve.grammar_process import foresee_message, read_answer, step_message

COMPILE_S, SHORT_S, WAIT_S = 10.0, 0.5, 60.0
"""Seconds that a grammar has to be compiled, also while others wait, and that a token is waited for: its process has
less, of the processor's time, but others may have the processor."""

QUICK_S = 0.2
"""Seconds after which its process lets others have the processors."""

_POLL_S, _FORESEE_S = 0.1, 0.005
"""Seconds between two looks at its process, and that guesses are waited for."""


class GrammarProcess:
    """A grammar's process.

    Attributes:
        connection: connection to the process.
        masks: what it allows, by the number of a reply.
        foreseen: the tokens that a reply probably goes on with, likewise.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection, self.masks, self.foreseen = connection, dict[int, bytes](), dict[int, list[int]]()
        self._pid = int(connection.recv_bytes())
        self._waiting, self._asked, self._replies, self._slow = 0, 0.0, 0, False

    def wait_compiled(self, crowded: Callable[[], bool], left: threading.Event) -> None:
        """Wait until it is compiled, or nobody waits for it.

        Raises:
            DataError, ApiError: it takes too long.
        """
        began = time.monotonic()
        while not self.connection.poll(_POLL_S):
            took = time.monotonic() - began
            if crowded() and took > SHORT_S:
                self.kill()
                message = f"it was not compiled in {SHORT_S:g} s, and others wait; ask again, or use a simpler one"
                raise ApiError(503, message, code="grammar_busy", retry_after_s=2)
            if took > COMPILE_S or left.is_set():
                self.kill()
                raise DataError(f"it was not compiled in {COMPILE_S:g} s; use a simpler one")

    def begin(self) -> int:
        """The number of a new reply."""
        self._replies += 1
        return self._replies

    def append(self, reply: int, message: bytes) -> None:
        """Append tokens to a reply, see `step_message`."""
        self.masks.pop(reply, None)
        self._waiting, self._asked = self._waiting + 1, time.monotonic()
        with suppress(OSError):  # it is found when the answer is awaited
            self.connection.send_bytes(message)

    @property
    def ready(self) -> bool:
        """Whether `mask` answers at once, with an error perhaps."""
        with suppress(OSError, EOFError):
            while self._waiting and self.connection.poll(0):
                self._receive()
            if not self._waiting:
                return True
            took = time.monotonic() - self._asked
            if took > QUICK_S:
                self.slow_down()
            return took > WAIT_S
        return True

    def mask(self, reply: int) -> bytes:
        """What may come next.

        Raises:
            DataError: it takes too long.
        """
        try:
            while reply not in self.masks and self.connection.poll(max(self._asked + WAIT_S - time.monotonic(), 0)):
                self._receive()
            return self.masks[reply]
        except (OSError, EOFError, KeyError) as error:
            self.kill()
            raise DataError("the schema or grammar takes too much memory or time; use a simpler one") from error

    def foresee(self, reply: int) -> list[int]:
        """Tokens that it probably goes on with; none if they take long to find."""
        self.foreseen.pop(reply, None)
        if self._slow:
            return []
        deadline = time.monotonic() + _FORESEE_S
        with suppress(OSError, EOFError):
            self.connection.send_bytes(foresee_message(reply))
            self._waiting += 1
            while reply not in self.foreseen and self.connection.poll(max(deadline - time.monotonic(), 0)):
                self._receive()
        return self.foreseen.get(reply, [])

    def _receive(self) -> None:
        reply, mask, foreseen = read_answer(self.connection.recv_bytes())
        self._waiting -= 1
        if mask is None:
            self.foreseen[reply] = foreseen
        else:
            self.masks[reply] = mask

    def slow_down(self) -> None:
        """Let others have the processors: it takes longer than most."""
        if not self._slow:
            self._slow = True
            yield_to_others(self._pid)

    def kill(self) -> None:
        """End it."""
        with suppress(OSError, EOFError):
            if not self.connection.poll(0):  # else it has answered, or is gone
                os.kill(self._pid, signal.SIGKILL)
        self.connection.close()


class RemoteMatcher:
    """A reply that follows a grammar in a process; does what llguidance's matcher does."""

    def __init__(self, process: GrammarProcess, grammar: int, begun: list[int], known: list[bytes]) -> None:
        self._process, self._grammar, self._begun, self._known = process, grammar, begun, known
        self._tokens, self._reply = list[int](), 0
        self._guessed, self._foreseen = 0, list[int]()

    def deep_copy(self) -> RemoteMatcher:
        """Another reply, which begins."""
        return RemoteMatcher(self._process, self._grammar, self._begun, self._known)

    def consume_token(self, token: int) -> None:
        """Append a token."""
        if self._reply:
            self._process.append(self._reply, step_message(self._reply, -1, [token]))
            return
        self._tokens.append(token)
        if self._tokens != self._begun[: len(self._tokens)]:
            self._reply = self._process.begin()
            self._process.append(self._reply, step_message(self._reply, self._grammar, self._tokens))

    def compute_bitmask(self) -> bytes:
        """What may come next, a bit for each token."""
        mask = self._process.mask(self._reply) if self._reply else self._known[len(self._tokens)]
        if not mask:
            raise DataError("the schema or grammar is too complex to be followed further; use a simpler one")
        return mask

    def compute_ff_tokens(self) -> list[int]:
        """What probably comes next, before free text; asked for once for a place of the reply."""
        if not self._guessed:
            self._foreseen = self._process.foresee(self._reply) if self._reply else []
        return self._foreseen[self._guessed :]

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """All, for guesses: whether they are allowed is not asked for, and they are not appended."""
        self._guessed += len(tokens)
        return len(tokens)

    def rollback(self, count: int) -> None:
        """Take them back."""
        self._guessed -= count

    def is_error(self) -> bool:
        """Whether the tokens are not allowed."""
        return not (self._process.mask(self._reply) if self._reply else self._known[len(self._tokens)])
