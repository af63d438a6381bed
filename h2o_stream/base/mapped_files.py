"""What mapped files and memory ask of the system, each where it has it."""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import sys
from contextlib import suppress
from typing import IO, Any

_PREALLOCATE, _ALLOCATE_ALL, _FROM_PHYSICAL_END = 42, 4, 3
"""The request of fcntl on macOS, and what its structure says."""


def reserve_room(file: IO[Any], size: int) -> None:
    """Reserve so many bytes on disk for a file that is no larger, which then has them.

    A full disk is an error now and not a crash at the first write to a mapped page.

    Raises:
        OSError: there is no room.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    if sys.platform == "darwin":
        import fcntl

        request = struct.pack("=Iiqqq", _ALLOCATE_ALL, _FROM_PHYSICAL_END, 0, size, 0)
        fcntl.fcntl(file.fileno(), _PREALLOCATE, request)
    file.truncate(size)


def prefer_huge_pages(memory: mmap.mmap) -> None:
    """Reads in many places wait for the addresses of small pages. Only Linux is asked; others choose by themselves."""
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)


def explain_bus_errors(line: str) -> None:
    """Write a line to stderr and end the process when a mapped page has no file any more, because that was cut short.

    Neither Python nor native code gets an exception then. Whoever has enabled `faulthandler` sees its traceback.
    """
    import ctypes

    def end(_: int) -> None:
        os.write(2, line.encode())
        os._exit(1)

    if not faulthandler.is_enabled():
        _HANDLERS.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(end))
        ctypes.CDLL(None).signal(signal.SIGBUS, _HANDLERS[-1])


_HANDLERS = list[Any]()
"""What the system calls stays."""
