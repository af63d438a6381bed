"""Limits memory that libraries would otherwise retain during long streams."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from h2o_stream.errors import OutOfMemoryError


def limit_kernel_caches() -> None:
    """Limit the caches of compiled kernels to 200 in oneDNN and 16 in torch; call before importing torch.

    Every prompt length and window size needs a kernel of 256 to 512 KB. With the default limits of 1,024 each, a long
    chat grows by about 700 MB. Kernels evicted from torch's cache are cheap to get from oneDNN.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "200")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "16")


def anonymous_memory(size: int) -> mmap.mmap:
    """Zeros outside the heap, which go back to the system when nothing refers to them; raises OutOfMemoryError."""
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    try:
        return mmap.mmap(-1, size, **flags)
    except (OSError, OverflowError) as error:
        raise OutOfMemoryError(f"there are no {format_bytes(size)} of memory; lower --window") from error


def trim_heap() -> None:
    """Return free heap memory to the system, for instance after a prompt; takes about 10 ms.

    Otherwise glibc retains more after every prompt, because of fragmentation. Does nothing on other systems.
    """
    if sys.platform == "linux" and (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        malloc_trim(0)


def peak_bytes() -> int:
    """Peak memory use of this process."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    with suppress(OSError, StopIteration, ValueError):  # on Linux ru_maxrss includes the parent process
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def disk_bytes() -> int:
    """Bytes that this process has read from disk so far, mapped files included; 0 on systems that do not count them."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
    return 0


def free_bytes(device: Any = None) -> int:
    """Memory that this process can still allocate, considering the machine and its control group (containers); or that
    is free on a CUDA device of torch.
    """
    if device is not None and device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    import psutil

    free = int(psutil.virtual_memory().available)
    cgroup = Path("/sys/fs/cgroup")
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return min(free, int(limit) - int(used))
    except (OSError, ValueError):  # no control group, or "max"
        return free


def format_bytes(nbytes: int) -> str:
    """Bytes with a binary unit: 11.7 MiB."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
