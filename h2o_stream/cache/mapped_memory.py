"""Memory in a mapped file: the system keeps in memory what is used, and writes the rest to disk."""

from __future__ import annotations

import mmap
import tempfile

from h2o_stream.base.mapped_files import reserve_room
from h2o_stream.base.resources import cache_folder
from h2o_stream.errors import H2OStreamError


def mapped_memory(size: int) -> mmap.mmap:
    """So many bytes of zeros in a file in the cache folder, which disappears with them.

    Raises:
        H2OStreamError: the file cannot be written, such as when the disk is full.
    """
    folder = cache_folder() / "slots"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            reserve_room(file, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise H2OStreamError(
            f"{size:,} bytes of the cache cannot be put on disk ({error}); "
            "make room, lower --window, or take --cache-device cpu"
        ) from error
