"""Caches the packed weights of transformers models, so that later starts map them instead of packing again.

A folder is a transformers checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from h2o_stream.models.new_packed_folder import NotCachedError, new_packed_folder
from h2o_stream.models.packed_folder import MIN_BYTES, WEIGHTS_FILE
from h2o_stream.progress import Progress, ProgressCallback

_REPORT_INTERVAL_S = 0.2
"""Interval of progress reports while writing."""


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
    with suppress(NotCachedError), new_packed_folder(folder, size, metadata, notify) as partial:
        model.config.save_pretrained(partial)
        _write(tensors, partial / WEIGHTS_FILE, size, progress)


def _write(tensors: dict[str, Tensor], path: Path, size: int, progress: ProgressCallback) -> None:
    """Write tensors of `size` bytes and report the size of the file meanwhile."""
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(safetensors.torch.save_file, tensors, path, {"format": "pt"})
        while not future.done():
            progress(Progress("writing", min(path.stat().st_size, size) if path.exists() else 0, size))
            wait([future], _REPORT_INTERVAL_S)
    future.result()
    progress(Progress("writing", size, size))
