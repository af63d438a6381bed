"""Long work of requests: in threads that nobody else waits for, and in pieces between which others have their turn.

Python threads take turns, except during a single call of a library. Tokenizers let others go on meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from json import scanner
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from h2o_stream.models.tokenizer import ASIDE
from h2o_stream.serve.long_texts import encode_aside

T = TypeVar("T")

LONG = 10_000
"""Characters from which a request is long: so many are tokenized in 15 ms."""

LARGE = 2**18
"""Bytes from which a state is large: they are read, checked and copied in a millisecond."""

_THREADS = 2


_TURNS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def aside(size: int, work: Callable[[], T]) -> T:
    """The result of work on so many characters: from another thread if they are many, else between other events, though
    many requests come together.
    """
    if size >= LONG:
        return await asyncio.wrap_future(_ASIDE.submit(work))
    async with _TURNS.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        await asyncio.sleep(0)
        return work()


class PatientDecoder(json.JSONDecoder):
    """Reads JSON as `json.loads` does, in Python but for the strings, so that other threads go on meanwhile."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]


def patient_json(value: Any) -> bytes:
    """The JSON of a value, written in the same way."""
    return "".join(json.JSONEncoder(ensure_ascii=False, allow_nan=False).iterencode(value)).encode()


class Threads:
    """Two threads for long work, so that little of it competes with replies. They do not keep a process from ending."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._started = False

    def submit(self, work: Callable[[], T], done: Callable[[], None] = lambda: None) -> Future[T]:
        """Do work in a thread, which then calls `done`; not if it is cancelled before."""
        if not self._started:
            self._started = True
            for number in range(_THREADS):
                threading.Thread(target=self._run, name=f"{self._name}-{number}", daemon=True).start()
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - whoever waits raises it
                future.set_exception(error)
            done()

        self._work.put(run)
        return future

    def _run(self) -> None:
        ASIDE.encode = encode_aside
        while True:
            self._work.get()()


_ASIDE = Threads("h2o-aside")
