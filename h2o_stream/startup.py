"""Makes startup fast and quiet. Must not import torch or transformers."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

LOADER = "h2o-loader"
"""Name of the thread that imports and loads."""


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


def quieten_libraries(progress: bool, warnings: bool) -> None:
    """Configure progress bars and warnings of libraries before they are imported."""
    if not progress:
        os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "warning" if warnings else "error")


def let_idle_threads_sleep() -> None:
    """Let the idle threads of GNU OpenMP, which torch uses, sleep soon; call before importing torch.

    By default they spin for milliseconds on the processors that the native library's threads need, which makes prefill
    ten times slower. A process that imports torch first has to set the variable itself.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
