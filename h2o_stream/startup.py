"""What makes a start quick and quiet. Must be importable before torch and transformers are."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

LOADER = "h2o-loader"
"""Name of a thread that imports and loads."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Import and load without the cyclic garbage collector.

    torch, transformers and a model make millions of objects that live on: scanning them again and again is a
    quarter of the start-up time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        gc.freeze()


def quieten_libraries(progress: bool, warnings: bool) -> None:
    """Tell the libraries, before they are imported, whether to show progress bars and warnings."""
    if not progress:
        os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "warning" if warnings else "error")


def let_idle_threads_sleep() -> None:
    """Tell GNU's OpenMP, which torch uses, to let its threads sleep soon after their work.

    By default they spin for milliseconds, on the processors that the native library's threads need next: prompts were
    read ten times slower. It is read when torch is imported; a process that imports torch first has to set it itself.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
