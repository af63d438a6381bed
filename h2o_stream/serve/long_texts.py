"""Long texts are tokenized in another process, which has the processors only while nobody else wants them.

A thread would need, at its end, what Python's threads take in turn, and keep all others waiting for it and a processor.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection

import numpy
from tokenizers import Tokenizer

from h2o_stream.base.processes import yield_to_others
from h2o_stream.base.token_texts import serialized
from h2o_stream.serve.beside import start_beside

_LONG = 2**17
"""Characters that take a fifth of a second."""


def encode_aside(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int] | None:
    """The tokens of a text from the other process; None if it is short, or cannot be read there."""
    if len(text) < _LONG:
        return None
    with suppress(OSError, EOFError):
        return _process(tokenizer).encode(text, add_special_tokens)
    _process.cache_clear()
    return None


class _Process:
    """A process with a tokenizer; it ends with this object."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._lock = threading.Lock()
        self._connection, _ = start_beside("h2o_stream.serve.long_texts")
        self._connection.send_bytes(serialized(tokenizer).encode())

    def encode(self, text: str, add_special_tokens: bool) -> list[int] | None:
        with self._lock:
            self._connection.send((text, add_special_tokens))
            tokens = self._connection.recv_bytes()
        return numpy.frombuffer(tokens, numpy.int32).tolist() or None


_process = cache(_Process)

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process.cache_clear)


def _main() -> None:
    yield_to_others(os.getpid())
    with Connection(int(sys.argv[1])) as asked, suppress(EOFError, OSError):
        tokenizer = Tokenizer.from_str(asked.recv_bytes().decode())
        while True:
            text, add_special_tokens = asked.recv()
            tokens = list[int]()
            with suppress(Exception):
                tokens = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            asked.send_bytes(numpy.array(tokens, numpy.int32).tobytes())


if __name__ == "__main__":
    _main()
