"""Runs each engine in its own process, so that memory and threads are not shared."""

from __future__ import annotations

import os
import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from h2o_stream.compare.speed.engines import ENGINES, EngineSpec
from h2o_stream.errors import H2OStreamError


class Worker:
    """An engine in its own process. A context manager: leaving it ends the process.

    Raises:
        H2OStreamError: the engine could not be started, or failed.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        context = get_context("spawn")
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_pipe, spec), daemon=True)
        self._process.start()
        child_pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of its `Runner`."""
        try:
            self._pipe.send((method, arguments))
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise H2OStreamError(f"{self.spec.name} ended without a word (out of memory?)") from error
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(pipe: Connection, spec: EngineSpec) -> None:
    """Handle calls until the pipe is closed."""
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 -- open as long as the process runs
    runner: Any = None
    failure: Exception | None = None
    try:
        runner = ENGINES[spec.engine](spec)
    except Exception as error:  # noqa: BLE001
        failure = _in_a_line(spec, error)
    while True:
        try:
            method, arguments = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            pipe.send(failure or getattr(runner, method)(*arguments))
        except Exception as error:  # noqa: BLE001
            pipe.send(_in_a_line(spec, error))


def _in_a_line(spec: EngineSpec, error: Exception) -> H2OStreamError:
    return error if isinstance(error, H2OStreamError) else H2OStreamError(f"{spec.name}: {error}")
