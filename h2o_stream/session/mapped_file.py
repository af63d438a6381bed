"""Files in memory without reading them, and without a file descriptor for each.

The memory of one stream has up to 2,000 files and may be larger than RAM. What Python's ``mmap`` maps keeps a
descriptor, of which a process often has no more than 1,024.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path

import numpy

from h2o_stream.cache.state import Array


def map_file(path: Path) -> Array:
    """The bytes of a file, uint8, read-only; raises OSError. It must not be made shorter as long as they are used."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if os.name != "posix" or not size:
            return numpy.fromfile(file, numpy.uint8)
        system = ctypes.CDLL(None, use_errno=True)
        take, release = system.mmap, system.munmap
        take.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        take.restype, release.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]
        address = take(None, size, mmap.PROT_READ, mmap.MAP_PRIVATE, file.fileno(), 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    mapped: Array = numpy.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    mapped.flags.writeable = False
    weakref.finalize(mapped, release, address, size).atexit = False  # views keep `mapped`
    return mapped
