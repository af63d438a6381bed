"""Contenders in processes of their own, so that none has the memory or the threads of another."""

from __future__ import annotations

import os
import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from h2o_stream.compare.contenders import RUNNERS, Contender
from h2o_stream.errors import H2OStreamError


class Worker:
    """A contender in a process of its own. A context manager: leaving it ends the process.

    Raises:
        H2OStreamError: its engine could not be started, or failed.
    """

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, contender), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of its `Runner`."""
        try:
            self._pipe.send((method, arguments))
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise H2OStreamError(f"{self.contender.name} ended without a word (out of memory?)") from error
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(pipe: Connection, contender: Contender) -> None:
    """Answer calls until the pipe is closed."""
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 -- for the life of the process
    try:
        runner = RUNNERS[contender.engine](contender)
    except Exception as error:  # noqa: BLE001
        failure = error

        def answer(method: str, arguments: tuple[Any, ...]) -> Any:
            return failure
    else:

        def answer(method: str, arguments: tuple[Any, ...]) -> Any:
            return getattr(runner, method)(*arguments)

    while True:
        try:
            method, arguments = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            pipe.send(answer(method, arguments))
        except Exception as error:  # noqa: BLE001
            told = error if isinstance(error, H2OStreamError) else H2OStreamError(f"{contender.name}: {error}")
            pipe.send(told)
