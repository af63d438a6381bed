"""What makes a start quick and quiet. Must be importable before torch and transformers are."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
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


def bound_kernel_cache() -> None:
    """Tell oneDNN, before torch is imported, to keep 200 kernels and not 1,024.

    It makes one for every length of a prompt and every size of a window, of more than half a megabyte each: without
    this a long chat grows by some 700 MB before it stops growing.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "200")


def quieten_libraries(progress: bool, warnings: bool) -> None:
    """Tell the libraries, before they are imported, whether to show progress bars and warnings."""
    if not progress:
        os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "warning" if warnings else "error")
