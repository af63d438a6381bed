"""How many threads native code uses, as many as torch, and how fast threads read memory."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy
import psutil

MAX_PER_PROCESSOR = 4


def num_threads() -> int:
    """The number that torch is set to; where it is not loaded, what it would be: OMP_NUM_THREADS or the cores. Of very
    many, which would only wait for each other, as many as `MAX_PER_PROCESSOR`.
    """
    torch = sys.modules.get("torch")
    wanted = torch.get_num_threads() if torch is not None else os.environ.get("OMP_NUM_THREADS", "")
    threads = int(str(wanted)[:9]) if str(wanted).isdecimal() else 0
    return min(threads or _cores(), _usable_processors() * (MAX_PER_PROCESSOR if threads else 1))


@cache
def _cores() -> int:
    """Of macOS, whose fast and slow cores differ, the fast ones."""
    if sys.platform == "darwin":
        cores, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
        ask = ctypes.CDLL(None).sysctlbyname
        if not ask(b"hw.perflevel0.physicalcpu", ctypes.byref(cores), ctypes.byref(size), None, 0):
            return cores.value
    return psutil.cpu_count(logical=False) or 1


def _usable_processors() -> int:
    """Processors that this process may use; several of them can share a core."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def bandwidth(threads: int | None = None, nbytes: int = 600_000_000, rounds: int = 5) -> float:
    """Bytes per second that threads, by default one per processor, read together: the best of some rounds."""
    threads = threads or _usable_processors()
    blocks = numpy.ones((threads, nbytes // threads // 8))
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            started = time.perf_counter()
            list(pool.map(numpy.max, blocks))
            seconds.append(time.perf_counter() - started)
    return blocks.nbytes / min(seconds)
