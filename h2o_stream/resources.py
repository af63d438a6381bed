"""Where files lie: what ships with the package, what the data wheels bring, and the user's own folders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from h2o_stream.errors import DataError

if TYPE_CHECKING:
    from importlib.metadata import PackagePath

APP = "h2o-stream"


def shipped(name: str) -> Path:
    """A file of the project, from an installed wheel or from a checkout."""
    package = Path(__file__).parent
    inside = package / name
    return inside if inside.exists() else package.parent / name


def named_prompts() -> dict[str, str]:
    """The texts in prompts/, by name."""
    return {path.stem: path.read_text(encoding="utf-8").strip() for path in sorted(shipped("prompts").glob("*.txt"))}


def is_file(path: Path) -> bool:
    """Whether there is a file of this name, however long or odd it is."""
    try:
        return path.expanduser().is_file()
    except (OSError, RuntimeError, ValueError):
        return False


def read_text(path: Path, place: str) -> str:
    """A text file of the user's.

    Args:
        path: where it is.
        place: what it is called in messages: the option or command, and its name.

    Raises:
        DataError: it cannot be read as UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 at byte {error.start}") from error
    except OSError as error:
        raise DataError(f"{place}: {error.strerror or error}") from error


def write_text(path: Path, text: str, place: str) -> None:
    """Write a text file, and the folder it is in.

    Raises:
        DataError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{place} {path}: {error.strerror or error}") from error


def manual() -> str:
    """A long text that is on every machine: the reference manual of Python, as its help() knows it.

    Raises:
        DataError: this Python came without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError("this Python came without the texts of its help(); give a --text") from error
    return "\n\n".join(topics[name] for name in sorted(topics))


def wheel_file(project: str, suffix: str) -> PackagePath | None:
    """The first file ending in `suffix` that an installed project brought, found without importing it."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        files = distribution(project).files or []
    except PackageNotFoundError:
        return None
    return next((file for file in files if str(file).endswith(suffix) and Path(str(file.locate())).exists()), None)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Make a folder all or nothing: the block fills one beside it, which gets its name at the end.

    What killed programs left of earlier attempts is removed; the caller holds a lock.
    """
    import shutil
    import tempfile

    for leftover in folder.parent.glob(f".{folder.name}.*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        yield partial
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class NoHomeError(DataError, OSError):
    """Nobody knows the user's folders: the user has no entry in the system's list, and no variable names them."""


def cache_folder() -> Path:
    """The user's cache folder of this program.

    Raises:
        NoHomeError: there is none.
    """
    return _folder("cache")


def data_folder() -> Path:
    """The user's folder for what should outlive a cache clean-up, such as the input history.

    Raises:
        NoHomeError: there is none.
    """
    return _folder("data")


def config_file() -> Path:
    """The user's file of options; H2O_CONFIG names another.

    Raises:
        NoHomeError: there is none.
    """
    named = os.environ.get("H2O_CONFIG")
    return Path(named) if named else _folder("config") / "config.toml"


def _folder(kind: Literal["cache", "data", "config"]) -> Path:
    import platformdirs

    try:
        folder: str = getattr(platformdirs, f"user_{kind}_dir")(APP, appauthor=False)
    except RuntimeError:
        folder = "~"
    if folder.startswith("~"):
        raise NoHomeError(f"this user has no home folder; set HOME or XDG_{kind.upper()}_HOME")
    return Path(folder)


def user_path(name: str, place: str) -> Path:
    """The path that a user typed, with the home folder for ``~``.

    Args:
        name: what was typed.
        place: what it is called in messages.

    Raises:
        DataError: there is no such home folder, or no path is written so.
    """
    if "\0" in name:
        raise DataError(f"{place}: no name of a file has a null character")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise DataError(f"{place}: there is no home folder {name.partition('/')[0]}") from error


def replace_surrogates(text: str) -> str:
    """Text that can be encoded: what was no UTF-8 on the command line or half a pair in JSON is a replacement sign."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)
