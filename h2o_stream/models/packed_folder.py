"""Where the packed weights of a model are cached.

A folder has `WEIGHTS_FILE`, `packed.json`, which describes its origin (`user_cache`), and a config with the formats of
its modules.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from h2o_stream.models.file_identity import model_identity
from h2o_stream.resources import cache_folder

FORMAT = 1
"""Version of the packed format, incremented when the layout of tiles changes."""

MIN_BYTES = 64 * 2**20
"""Minimum size of packed weights for keeping them; smaller models are packed quickly."""

MIN_GGUF_BYTES = 2**30
"""Minimum size of a GGUF file for keeping its repacked weights; smaller files are repacked quickly."""


WEIGHTS_FILE = "model.safetensors"


def packed_folder(name: str, source: Path, quantize: str) -> Path:
    """The folder for a model, whether it exists or not; another one if the files of the source change.

    The name is the one the user typed, the format ``int8``, ``int4`` or ``gguf``.
    """
    digest = hashlib.sha256(f"{model_identity(source)} {FORMAT}".encode()).hexdigest()[:12]
    stem = re.sub(r"[^\w.-]+", "-", Path(name).name or name)[-60:]
    return cache_folder() / "packed" / f"{stem}-{quantize}-{digest}"
