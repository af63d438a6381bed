"""Locates files: those of the package, of data wheels, and in the user's folders (`NoHomeError` if there are none)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, Literal

from h2o_stream.errors import DataError, H2OStreamError, file_errors, install_command

APP = "h2o-stream"

PRIVATE = 0o600
"""Mode of files that only the user may read."""


def project_file(name: str) -> Path:
    """A file of the project, from an installed wheel or a checkout."""
    package = Path(__file__).parents[1]
    packaged = package / name
    return packaged if packaged.exists() else package.parent / name


def named_prompts() -> dict[str, str]:
    """The texts in prompts/ and in the user's folder of that name, which go first, by name."""
    folders = [project_file("prompts")]
    with suppress(NoHomeError):
        folders.append(prompts_folder())
    paths = {path.stem: path for folder in folders for path in sorted((*folder.glob("*.md"), *folder.glob("*.txt")))}
    return {name: text for name, path in paths.items() if (text := _text_of(path))}


def _text_of(path: Path) -> str:
    """The text of a file; nothing if it cannot be read, or is none."""
    with suppress(OSError):
        if path.is_file():
            return path.read_text(encoding="utf-8-sig", errors="replace").strip()
    return ""


def prompts_folder() -> Path:
    """The user's folder of named prompts."""
    return _folder("config") / "prompts"


def is_file(path: Path) -> bool:
    """Whether a file of this name exists; accepts any string."""
    try:
        return path.expanduser().is_file()
    except (OSError, RuntimeError, ValueError):
        return False


def require_package(module: str, packages: str, what: str) -> None:
    """Raise H2OStreamError, saying what needs the module and what installs it, if it cannot be imported."""
    if find_spec(module) is None:
        raise H2OStreamError(f"{what}: {install_command(packages)}")


def require_matplotlib() -> None:
    """Check that charts can be drawn: commands install matplotlib if it is missing, and run again."""
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")


def write_text(path: Path, text: str, label: str) -> None:
    """Write a text file, and create its folder; raises DataError if it cannot be written."""
    with file_errors(f"{label} {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def python_manual() -> str:
    """A long text that every machine has, Python's reference manual of help(); raises DataError without it."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError("this Python has no help() texts; give a --text") from error
    return "\n\n".join(topics[name] for name in sorted(topics))


@cache
def version_of(package: str) -> str:
    """The version of an installed package, whose metadata take milliseconds to read; nothing if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    with suppress(PackageNotFoundError):
        return version(package)
    return ""


def wheel_file(project: str, suffix: str) -> Path | None:
    """The first file of an installed distribution that ends in `suffix`, without importing it."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        files = distribution(project).files or []
    except PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if str(file).endswith(suffix))
    return next((path for path in paths if path.exists()), None)


def write_atomically(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file completely, or leave it as it was, or raise OSError. `mode` is that of a new file."""
    with atomic_file(path, mode) as file:
        file.write(data)


@contextmanager
def atomic_file(path: Path, mode: int = 0o666, sync: bool = True) -> Iterator[BinaryIO]:
    """Create a file atomically, or raise OSError: the block fills another one, which takes its name at the end.

    With `sync` it is on disk then, and survives a power failure. `mode` is that of a new file.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Create a folder atomically: the block fills a temporary folder, which is renamed at the end.

    Removes leftovers of interrupted attempts; the caller must hold a lock.
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
    """The user's folders are unknown: there is neither a passwd entry nor an environment variable."""


def cache_folder() -> Path:
    """The user's cache folder for this program."""
    return _folder("cache")


def data_folder() -> Path:
    """The user's folder for persistent data, such as the input history."""
    return _folder("data")


def private_data_folder(name: str = "") -> Path:
    """Create a folder in the data folder, both listable by the user only, or raise OSError."""
    folder = data_folder() / name
    for path in dict.fromkeys((data_folder(), folder)):
        make_private_folder(path)
    return folder


def make_private_folder(path: Path) -> None:
    """Create a folder that only the user may list, or raise OSError; one that is there and the user's becomes so."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid") and path.stat().st_uid == os.getuid() and path.stat().st_mode & 0o077:
        path.chmod(0o700)


def remove_oldest(folder: Path, pattern: str, keep: int) -> None:
    """Remove the files of a pattern that were changed longest ago, all but `keep`. Errors are ignored."""
    for path in oldest(folder.glob(pattern), keep):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def oldest(paths: Iterable[Path], keep: int) -> list[Path]:
    """Those that were changed longest ago, all but `keep`; others may remove some meanwhile."""
    times = dict[Path, int]()
    for path in paths:
        with suppress(OSError):
            times[path] = path.stat().st_mtime_ns
    return sorted(times, key=times.__getitem__)[: max(0, len(times) - keep)]


def config_file() -> Path:
    """The user's config file; H2O_CONFIG overrides it."""
    named = os.environ.get("H2O_CONFIG")
    return Path(named) if named else _folder("config") / "config.toml"


def log_file() -> Path:
    """The file for warnings and log records of libraries."""
    return _folder("log") / f"{APP}.log"


def _folder(kind: Literal["cache", "data", "config", "log"]) -> Path:
    import platformdirs

    try:
        folder: str = getattr(platformdirs, f"user_{kind}_dir")(APP, appauthor=False)
    except RuntimeError:
        folder = "~"
    if folder.startswith("~"):
        variable = "STATE" if kind == "log" else kind.upper()
        raise NoHomeError(f"this user has no home folder; set HOME or XDG_{variable}_HOME")
    return Path(folder)


def user_path(name: str, label: str) -> Path:
    """A path typed by the user, with ``~`` expanded; raises DataError, beginning with the label, if it is invalid."""
    if "\0" in name:
        raise DataError(f"{label}: file names cannot contain null characters")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise DataError(f"{label}: there is no home folder {name.partition('/')[0]}") from error


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, from invalid UTF-8 in arguments or JSON, so that the text can be encoded."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)
