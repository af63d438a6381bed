"""Makes startup fast and quiet. Must not import torch or transformers."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path

from h2o_stream.base.resources import PRIVATE, NoHomeError, log_file, make_private_folder

LOADER, LOG = "h2o-loader", "h2o-log"
"""Names of the thread that imports and loads, and of the handler of the log file."""

_MAX_LOG_BYTES = 2**20
"""A log of this size becomes the one before, of which there is one."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector while importing and loading.

    torch, transformers and a model create millions of long-lived objects; scanning them repeatedly takes a quarter of
    the startup time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        gc.freeze()


@contextmanager
def importing() -> Iterator[None]:
    """Wraps the imports of torch and transformers: makes them faster, and sends what they log to the log alone."""
    with gc_paused():
        try:
            yield
        finally:
            _remove_screen_handlers()


def quieten_libraries(progress: bool) -> None:
    """Configure progress bars, warnings, log records and statistics of libraries before they are imported."""
    if not progress:
        os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # until its handler is removed
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # it asks the Hub, even for files on this machine
    _start_log()


def _start_log() -> None:
    """Send Python's warnings and all log records to the log file, or nowhere if it cannot be written."""
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a full disk is no reason to write over the screen
    if any(handler.name == LOG for handler in logging.root.handlers):
        return
    handler: logging.Handler = logging.NullHandler()
    try:
        path = log_file()
        make_private_folder(path.parent)
        handler = _LogFile(path, encoding="utf-8")
    except (NoHomeError, OSError):
        pass
    handler.name = LOG
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    logging.root.addHandler(handler)


class _LogFile(logging.FileHandler):
    """A log that only the user may read, of limited size. What cannot be written is lost, and stops nobody."""

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE)
        if hasattr(os, "fchmod") and os.fstat(descriptor).st_uid == os.getuid():
            os.fchmod(descriptor, PRIVATE)  # earlier versions let all read it
        return os.fdopen(descriptor, "a", encoding="utf-8", errors="replace")

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record to the file."""
        with suppress(OSError):
            if self.stream is not None and os.fstat(self.stream.fileno()).st_size > _MAX_LOG_BYTES:
                Path(self.baseFilename).replace(f"{self.baseFilename}.1")
                self.stream.close()
                self.stream = self._open()
            super().emit(record)


def _remove_screen_handlers() -> None:
    """Let libraries log where the root logger does, in place of the screen."""
    if not any(handler.name == LOG for handler in logging.root.handlers):
        return
    for name in list(logging.root.manager.loggerDict):
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.__stderr__):
                logger.removeHandler(handler)
                logger.propagate = True
                logger.setLevel(min(logger.level, logging.WARNING))


def let_idle_threads_sleep() -> None:
    """Let the idle threads of GNU OpenMP, which torch uses, sleep soon; call before importing torch.

    By default they spin for milliseconds on the processors that the native library's threads need, which makes prefill
    ten times slower. A process that imports torch first has to set the variable itself.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
