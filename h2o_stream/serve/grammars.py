"""Grammars in processes of their own, which can be ended: what a client asks for stops neither others nor the server.

Compiling a grammar, and finding what it allows after a token, may take any time and memory. The process of a grammar
works while the model takes its step; see `grammar_process` and `grammar_client`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

from h2o_stream.base.token_texts import serialized
from h2o_stream.engine.grammar import Grammar, added_texts
from h2o_stream.engine.text import Markers
from h2o_stream.errors import DataError
from h2o_stream.serve.beside import start_beside
from h2o_stream.serve.errors import stopping
from h2o_stream.serve.grammar_client import QUICK_S, GrammarProcess, RemoteMatcher
from h2o_stream.serve.places import Places
from h2o_stream.serve.schemas import is_larger

PLACES = 8
"""Grammars that are compiled at once."""

MAX_SUM_BYTES = 2**30
"""Memory of all grammars. The largest one is ended where it is not enough."""

MAX_SIZE = 2**20
"""Characters of a grammar."""

ASKER: ContextVar[str] = ContextVar("asker", default="")
"""Whose request is answered: the owner, or the address where there are no keys."""


class Grammars:
    """Compiles grammars for one model.

    Args:
        tokenizer: see `Grammar`, as the others.
        kept: how many there are at once, each with its process; further ones wait until a reply ends.

    Attributes:
        compiling: places of those that are compiled.
        kept: places of all.
        beginning: held by the one that is compiled as fast as the model makes its steps.
    """

    def __init__(self, tokenizer: Any, end_tokens: Collection[int], vocabulary: int, kept: int) -> None:
        self._values = tokenizer, end_tokens, vocabulary
        serialized(tokenizer.backend_tokenizer)  # before anybody waits
        self._threads, self._lock = ThreadPoolExecutor(PLACES, "h2o-grammar"), threading.Lock()
        self.compiling, self.kept = Places(PLACES), Places(kept)
        self.beginning = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._server: Connection | None = None
        self._closed = False

    async def make(self, rules: Mapping[str, Any] | str, thinking: Markers | None) -> RemoteGrammar:
        """Compile a grammar, see `Grammar` and, for the `ASKER`, `Places`. It has a place of those `kept`, which its
        user leaves.

        Raises:
            DataError: it is not supported, or takes too long.
            ApiError: others wait, and it takes longer than they have time.
        """
        loop, left = asyncio.get_running_loop(), threading.Event()
        await self.kept.take(ASKER.get())
        try:
            await self.compiling.take(ASKER.get())
            try:
                make = partial(RemoteGrammar, self, left, *self._values, rules, thinking)
                return await loop.run_in_executor(self._threads, make)
            finally:
                left.set()
                self.compiling.leave()
        except BaseException:
            self.kept.leave()
            raise

    def connect(self) -> Connection:
        """A connection to a new process."""
        for again in (True, False):
            with self._lock:
                if self._closed:
                    raise stopping()
                ours, theirs = socket.socketpair()
                with ours, theirs:
                    try:
                        server, process = self._started()
                        send_handle(server, theirs.fileno(), process.pid)
                        return Connection(ours.detach())
                    except OSError:
                        if not again:
                            raise
                        self._end()
        raise AssertionError

    def _started(self) -> tuple[Connection, subprocess.Popen[bytes]]:
        if self._server is None or self._process is None:
            self._server, self._process = start_beside("h2o_stream.serve.grammar_process")
            tokenizer, ends, vocabulary = self._values
            made, added = serialized(tokenizer.backend_tokenizer), added_texts(tokenizer)
            metadata = {"tokenizer": made, "vocabulary": vocabulary, "ends": sorted(ends), "added": added}
            self._server.send_bytes(json.dumps(metadata | {"max_bytes": MAX_SUM_BYTES}).encode())
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


class RemoteGrammar(Grammar):
    """A grammar in a process, which ends with the last matcher."""

    def __init__(self, grammars: Grammars, left: threading.Event, *values: Any) -> None:
        self._grammars, self._left = grammars, left
        super().__init__(*values)

    def _compile(self, vocabulary: int, rules: Mapping[str, Any] | str) -> tuple[Any, Any]:
        if is_larger(rules, MAX_SIZE):
            raise DataError(f"it has more than {MAX_SIZE} characters; use a simpler one")
        opening = self._thinking.opening if self._thinking else ""
        begun = self._tokenizer(opening, add_special_tokens=False)["input_ids"] if opening else []
        asked = {"rules": rules, "thinking": asdict(self._thinking) if self._thinking else None, "begun": begun}
        asked["sample"] = self._sample
        try:
            with self._grammars.beginning:
                process = self._process = GrammarProcess(self._grammars.connect())
                process.connection.send_bytes(json.dumps(asked).encode())
                if not process.connection.poll(QUICK_S):
                    process.slow_down()
            process.wait_compiled(lambda: self._grammars.compiling.crowded, self._left)
            answer = process.connection.recv_bytes()
            if not answer.startswith(b"+"):
                raise DataError(answer[1:].decode(errors="replace"))
            masks = [[process.connection.recv_bytes() for _ in (0, *begun)] for _ in range(1 + bool(self._thinking))]
        except DataError:
            process.kill()
            raise
        except (EOFError, OSError) as error:
            raise DataError("it takes too much memory or time; use a simpler one") from error
        strict, *free = (RemoteMatcher(process, number, begun, known) for number, known in enumerate(masks))
        return strict, free[0] if free else None

    @property
    def ready(self) -> bool:  # type: ignore[override]
        """Whether its matchers answer at once; they raise an error if they take too long."""
        return self._process.ready
