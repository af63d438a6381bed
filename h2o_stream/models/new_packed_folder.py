"""Begins a folder of packed weights in the user's cache folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import Timeout

from h2o_stream.memory import format_bytes
from h2o_stream.models.user_cache import METADATA_FILE, folder_lock, remove_replaced
from h2o_stream.resources import atomic_folder

_RESERVED_BYTES = 2**28
"""Disk space that must remain free, in bytes."""


class NotCachedError(Exception):
    """Packed weights are not cached; `notify` got the reason, if it concerns the user."""


@contextmanager
def new_packed_folder(
    folder: Path, size: int, metadata: Mapping[str, str], notify: Callable[[str], None]
) -> Iterator[Path]:
    """Create the folder of packed weights of `size` bytes atomically: the block fills the yielded one.

    Raises:
        NotCachedError: the disk is full or not writable, or another process is writing the folder or has written it.
    """
    parent = folder.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(parent).free) < size + _RESERVED_BYTES:
            notify(
                f"The packed weights are not cached: "
                f"they take {format_bytes(size)}, {format_bytes(free)} are free in {parent}."
            )
            raise NotCachedError
        with folder_lock(folder).acquire(timeout=0):
            if folder.exists():
                raise NotCachedError
            notify(
                f"Caching the packed weights for faster starts: "
                f"{format_bytes(size)} in {folder} (--forget removes them)."
            )
            with atomic_folder(folder) as partial:
                yield partial
                (partial / METADATA_FILE).write_text(json.dumps(dict(metadata)), encoding="utf-8")
        remove_replaced(folder)
    except Timeout as error:
        raise NotCachedError from error
    except OSError as error:
        notify(f"The packed weights are not cached: {error.strerror or error} ({parent}).")
        raise NotCachedError from error
