"""Grammars in processes of their own, which can be ended: what a client asks for stops neither others nor the server.

Compiling a grammar, and finding what it allows after a token, may take any time and memory. The process of a grammar
works while the model takes its step; see `grammar_process`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

from h2o_stream.engine.grammar import Grammar, added_texts
from h2o_stream.errors import DataError
from h2o_stream.serve.errors import ApiError
from h2o_stream.serve.grammar_process import foresee_message, read_answer, step_message
from h2o_stream.serve.schemas import is_larger
from h2o_stream.session.thinking import Markers

PLACES, COMPILE_S, SHORT_S, STEP_S = 8, 10.0, 0.5, 2.0
"""Grammars that are compiled at once, seconds that each has, also while others wait, and seconds of a token."""

MAX_SIZE = 2**20
"""Characters of a grammar."""

_POLL_S, _QUICK_S, _NICE = 0.02, 0.2, 15

_FORESEE_S = 0.005
"""Seconds that guesses are waited for."""

ASKER: ContextVar[str] = ContextVar("asker", default="")
"""Whose request is answered: the owner, or the address where there are no keys."""


class Grammars:
    """Compiles grammars for one model.

    Args:
        tokenizer: see `Grammar`, as the others.

    Attributes:
        beginning: held by the one that is compiled as fast as the model makes its steps.
    """

    def __init__(self, tokenizer: Any, end_tokens: Collection[int], vocabulary: int) -> None:
        self._values = tokenizer, end_tokens, vocabulary
        self._threads, self._free, self._lock = ThreadPoolExecutor(PLACES, "h2o-grammar"), PLACES, threading.Lock()
        self._queues = dict[str, deque[asyncio.Future[None]]]()
        self.beginning = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._server: Connection | None = None
        self._closed = False

    async def make(self, rules: Mapping[str, Any] | str, thinking: Markers | None) -> Grammar:
        """Compile a grammar, see `Grammar`. Those of one `ASKER` wait for each other, not for those of others.

        Raises:
            DataError: it is not supported, or takes too long.
            ApiError: others wait, and it takes longer than they have time.
        """
        await self._take_place(ASKER.get())
        left = threading.Event()
        try:
            make = partial(_RemoteGrammar, self, left, *self._values, rules, thinking)
            return await asyncio.get_running_loop().run_in_executor(self._threads, make)
        finally:
            left.set()
            self._pass_place()

    async def _take_place(self, asker: str) -> None:
        if self._free:
            self._free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(asker, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self._pass_place()
            raise

    def _pass_place(self) -> None:
        """Let the next one begin, of whoever has waited longest."""
        while self._queues:
            asker = next(iter(self._queues))
            queue = self._queues.pop(asker)
            place = queue.popleft()
            if queue:
                self._queues[asker] = queue
            if not place.done():  # else its client has left
                place.set_result(None)
                return
        self._free += 1

    @property
    def crowded(self) -> bool:
        """Whether others wait until something is compiled."""
        return any(not place.done() for queue in [*self._queues.values()] for place in [*queue])

    def connect(self) -> Connection:
        """A connection to a new process."""
        for again in (True, False):
            try:
                with self._lock:
                    if self._closed:
                        raise DataError("the server is stopping")
                    ours, theirs = socket.socketpair()
                    with theirs:
                        server, process = self._started()
                        send_handle(server, theirs.fileno(), process.pid)
                    return Connection(ours.detach())
            except OSError:
                ours.close()
                if not again:
                    raise
                self._end()
        raise AssertionError

    def _started(self) -> tuple[Connection, subprocess.Popen[bytes]]:
        if self._server is None or self._process is None:
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-m", "h2o_stream.serve.grammar_process", str(theirs.fileno())]
            with theirs:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()], start_new_session=True,
                )  # fmt: skip
            self._server = Connection(ours.detach())
            tokenizer, ends, vocabulary = self._values
            serialized, added = tokenizer.backend_tokenizer.to_str(), added_texts(tokenizer)
            metadata = {"tokenizer": serialized, "vocabulary": vocabulary, "ends": sorted(ends), "added": added}
            self._server.send_bytes(json.dumps(metadata).encode())
            self._server.recv_bytes()
        return self._server, self._process

    def close(self) -> None:
        """End all of its processes."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _end(self) -> None:
        process, server, self._process, self._server = self._process, self._server, None, None
        if server is not None:
            server.close()
        if process is not None:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class _RemoteGrammar(Grammar):
    """A grammar in a process, which ends with the last matcher."""

    def __init__(self, grammars: Grammars, left: threading.Event, *values: Any) -> None:
        self._grammars, self._left = grammars, left
        super().__init__(*values)

    def _compile(self, vocabulary: int, rules: Mapping[str, Any] | str) -> tuple[Any, Any]:
        if is_larger(rules, MAX_SIZE):
            raise DataError(f"it has more than {MAX_SIZE} characters; use a simpler one")
        opening = self._thinking.opening if self._thinking else ""
        begun = self._tokenizer(opening, add_special_tokens=False)["input_ids"] if opening else []
        asked = {"rules": rules, "thinking": asdict(self._thinking) if self._thinking else None, "begun": begun}  # type: ignore[call-overload]
        asked["sample"] = self._sample
        try:
            with self._grammars.beginning:
                process = self._process = _Process(self._grammars.connect())
                process.connection.send_bytes(json.dumps(asked).encode())
                if not process.connection.poll(_QUICK_S):
                    process.slow_down()
            process.wait_compiled(self._grammars, self._left)
            answer = process.connection.recv_bytes()
            if not answer.startswith(b"+"):
                raise DataError(answer[1:].decode(errors="replace"))
            masks = [[process.connection.recv_bytes() for _ in (0, *begun)] for _ in range(1 + bool(self._thinking))]
        except DataError:
            process.kill()
            raise
        except (EOFError, OSError) as error:
            raise DataError("it takes too much memory or time; use a simpler one") from error
        strict, *free = (_RemoteMatcher(process, number, begun, known) for number, known in enumerate(masks))
        return strict, free[0] if free else None

    @property
    def ready(self) -> bool:  # type: ignore[override]
        """Whether its matchers answer at once; they raise an error if they take too long."""
        return self._process.ready


class _Process:
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

    def wait_compiled(self, grammars: Grammars, left: threading.Event) -> None:
        """Wait until it is compiled, or nobody waits for it.

        Raises:
            DataError, ApiError: it takes too long.
        """
        began = time.monotonic()
        while not self.connection.poll(_POLL_S):
            took = time.monotonic() - began
            if grammars.crowded and took > SHORT_S:
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
            if took > _QUICK_S:
                self.slow_down()
            return took > STEP_S
        return True

    def mask(self, reply: int) -> bytes:
        """What may come next.

        Raises:
            DataError: it takes too long.
        """
        try:
            while reply not in self.masks and self.connection.poll(max(self._asked + STEP_S - time.monotonic(), 0)):
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
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._pid, _NICE)

    def kill(self) -> None:
        """End it."""
        with suppress(OSError, EOFError):
            if not self.connection.poll(0):  # else it has answered, or is gone
                os.kill(self._pid, signal.SIGKILL)
        self.connection.close()


class _RemoteMatcher:
    """A reply that follows a grammar in a process; does what llguidance's matcher does."""

    def __init__(self, process: _Process, grammar: int, begun: list[int], known: list[bytes]) -> None:
        self._process, self._grammar, self._begun, self._known = process, grammar, begun, known
        self._tokens, self._reply = list[int](), 0
        self._guessed, self._foreseen = 0, list[int]()

    def deep_copy(self) -> _RemoteMatcher:
        """Another reply, which begins."""
        return _RemoteMatcher(self._process, self._grammar, self._begun, self._known)

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
