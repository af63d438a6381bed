"""Where files lie: what ships with the package, what the data wheels bring, and the user's own folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

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


def in_wheel(project: str, suffix: str) -> PackagePath | None:
    """The first file ending in `suffix` that an installed project brought, found without importing it."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        files = distribution(project).files or []
    except PackageNotFoundError:
        return None
    return next((file for file in files if str(file).endswith(suffix) and Path(str(file.locate())).exists()), None)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
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


def cache_folder() -> Path:
    """The user's cache folder of this program."""
    import platformdirs

    return Path(platformdirs.user_cache_dir(APP, appauthor=False))


def data_folder() -> Path:
    """The user's folder for what should outlive a cache clean-up, such as the input history."""
    import platformdirs

    return Path(platformdirs.user_data_dir(APP, appauthor=False))


def config_file() -> Path:
    """The user's file of options; H2O_CONFIG names another."""
    import platformdirs

    named = os.environ.get("H2O_CONFIG")
    return Path(named) if named else Path(platformdirs.user_config_dir(APP, appauthor=False)) / "config.toml"
