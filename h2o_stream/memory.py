"""Keeps the memory of a long stream flat: what libraries hold on to that nobody needs any more."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path


def limit_kernel_caches() -> None:
    """Tell oneDNN, before torch is imported, to keep 200 kernels, and torch to keep 16 beside them.

    There is one for every length of a prompt and every size of a window, of a quarter to half a megabyte each: with the
    1,024 that each of the two keeps by default a long chat grows by some 700 MB before it stops growing. What torch has
    forgotten it gets from oneDNN at little cost.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "200")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "16")


def trim_heap() -> None:
    """Have the C library give free pages back to the system, after a prompt for instance: some 10 ms.

    glibc keeps most of them otherwise, and more from prompt to prompt as they are scattered. Does nothing elsewhere.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def peak_bytes() -> int:
    """The most memory that this process ever had in use, as the system has kept it."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    with suppress(OSError, StopIteration, ValueError):  # Linux; ru_maxrss counts who started the process there
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_bytes() -> int:
    """Bytes of memory that a process may still take: of the machine, and of its control group (containers)."""
    import psutil

    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        most, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return min(free, int(most) - int(used))
    except (OSError, ValueError):  # no such group, or "max"
        return free
