"""Caches packed weights in the user's cache folder, so that later starts map them instead of packing again.

A folder is a transformers checkpoint with an additional `packed.json` that describes its origin.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import safetensors.torch
from filelock import Timeout
from torch import Tensor

from h2o_stream.models.precision import format_bytes
from h2o_stream.models.user_cache import METADATA_FILE, folder_lock, remove_replaced
from h2o_stream.progress import Progress, ProgressCallback
from h2o_stream.resources import atomic_folder

MIN_BYTES = 64 * 2**20
"""Minimum size for caching; smaller models are packed quickly."""

_REPORT_INTERVAL_S = 0.2
"""Interval of progress reports while writing."""

_RESERVED_BYTES = 2**28
"""Disk space that must remain free, in bytes."""


def save_packed(
    model: Any, folder: Path, metadata: Mapping[str, str], notify: Callable[[str], None], progress: ProgressCallback
) -> None:
    """Save the weights of a packed model atomically, with metadata in `packed.json` (`user_cache`).

    Does nothing but notify if the disk is full or not writable, and nothing if another process is writing the folder.
    """
    tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size < MIN_BYTES:
        return
    parent = folder.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(parent).free) < size + _RESERVED_BYTES:
            notify(
                f"The packed weights are not cached: "
                f"they take {format_bytes(size)}, {format_bytes(free)} are free in {parent}."
            )
            return
        with folder_lock(folder).acquire(timeout=0):
            if folder.exists():
                return
            notify(
                f"Caching the packed weights for faster starts: "
                f"{format_bytes(size)} in {folder} (--forget removes them)."
            )
            with atomic_folder(folder) as partial:
                model.config.save_pretrained(partial)
                _write(tensors, partial / "model.safetensors", size, progress)
                (partial / METADATA_FILE).write_text(json.dumps(dict(metadata)), encoding="utf-8")
        remove_replaced(folder)
    except Timeout:
        pass
    except OSError as error:
        notify(f"The packed weights are not cached: {error.strerror or error} ({parent}).")


def _write(tensors: dict[str, Tensor], path: Path, size: int, progress: ProgressCallback) -> None:
    """Write tensors of `size` bytes and report the size of the file meanwhile."""
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(safetensors.torch.save_file, tensors, path, {"format": "pt"})
        while not future.done():
            progress(Progress("writing", min(path.stat().st_size, size) if path.exists() else 0, size))
            wait([future], _REPORT_INTERVAL_S)
    future.result()
    progress(Progress("writing", size, size))
