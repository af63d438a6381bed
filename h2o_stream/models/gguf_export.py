"""Exports the tokenizer of a GGUF file to a cached folder that transformers can load.

This module makes that atomic and safe for concurrent processes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from h2o_stream.base.processes import python_command
from h2o_stream.base.progress import ignore
from h2o_stream.base.resources import atomic_folder, cache_folder, oldest
from h2o_stream.errors import H2OStreamError, UnsupportedModelError
from h2o_stream.models.file_identity import model_identity
from h2o_stream.models.generation_config import end_token_ids
from h2o_stream.models.gguf import GgufFile

_FORMAT = 6
"""Incremented when the exported files change."""

_MAX_FOLDERS = 50
"""Exports that are kept; one more removes the one that was used longest ago."""

_TOKENS = "tokenizer.ggml.tokens"


def export_tokenizer(file: GgufFile, notify: Callable[[str], None]) -> Path:
    """Return the folder with generation_config.json and tokenizer of a GGUF file; create it if necessary.

    `notify` is called if another process is creating it.

    Raises:
        ModelNotFoundError: the metadata is damaged.
        UnsupportedModelError: transformers does not know the tokenizer.
        H2OStreamError: the folder cannot be written.
    """
    folder = _folder(file)
    parent = folder.parent
    if folder.exists():
        with suppress(OSError):
            os.utime(folder)
        return folder
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with _folder_locked(
            parent / f"{folder.name}.lock", lambda: notify(f"Another program is reading {file.path.name} ...")
        ):
            if not folder.exists():
                with atomic_folder(folder) as partial:
                    _export(file, partial)
                _prune(parent)
    except OSError as error:
        raise H2OStreamError(
            f"the tokenizer of {file.path.name} could not be written into {parent}: {error.strerror or error}"
        ) from error
    return folder


def export_apart(file: GgufFile, notify: Callable[[str], None]) -> Path:
    """Do what `export_tokenizer` does without transformers in this process, if another one can."""
    if not _folder(file).exists():
        code = "from h2o_stream.models.gguf_export import main; main()"
        with suppress(OSError):
            subprocess.run(python_command(code, str(file.path)), capture_output=True, check=False)
    return export_tokenizer(file, notify)


def main() -> None:
    """Export the file in `sys.argv`."""
    export_tokenizer(GgufFile(Path(sys.argv[1])), ignore)


def _folder(file: GgufFile) -> Path:
    return cache_folder() / "gguf" / f"{file.path.stem}-{model_identity(file)}-{_FORMAT}"


def _prune(parent: Path) -> None:
    """Remove exports in older formats, and those that were used longest ago."""
    folders = [path for path in parent.iterdir() if path.is_dir() and not path.name.startswith(".")]
    current = [path for path in folders if path.name.endswith(f"-{_FORMAT}")]
    for path in [*set(folders).difference(current), *oldest(current, _MAX_FOLDERS)]:
        shutil.rmtree(path, ignore_errors=True)
        (parent / f"{path.name}.lock").unlink(missing_ok=True)


@contextmanager
def _folder_locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        on_wait()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _export(file: GgufFile, target: Path) -> None:
    """Let transformers convert the tokenizer, and save the results."""
    from transformers import GenerationConfig

    try:
        with _quiet_transformers():
            tokenizer = _tokenizer(file)
    except H2OStreamError:
        raise
    except Exception as error:  # damaged metadata can raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if "architecture" in reason or "model type" in reason:
            raise UnsupportedModelError(f"{file.path.name} cannot be served: {reason}") from error
        raise file.damaged(reason) from error
    bos, pad = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "padding"))
    generation = GenerationConfig(bos_token_id=bos, eos_token_id=end_token_ids(file), pad_token_id=pad)
    generation.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _remove_added_tokens(target / "tokenizer.json", file.metadata[_TOKENS].count)


def _tokenizer(file: GgufFile) -> Any:
    """The tokenizer, of a class of transformers. It is converted by `gguf_tokenizer`, or else by transformers."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    from h2o_stream.models.gguf_tokenizer import TOKEN_KEYS, byte_level_tokenizer, named_tokens

    if tokenizer := byte_level_tokenizer(file):
        special = dict.fromkeys(TOKEN_KEYS) | tokenizer.special_tokens_map
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, chat_template=tokenizer.chat_template, **special
        )
    architecture, vocabulary, settings = get_gguf_tokenizer(str(file.path))
    named = {name: vocabulary["tokens"][number] for name, number in named_tokens(file).items()}
    backend, _ = convert_gguf_tokenizer(architecture, vocabulary)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{**settings, **dict.fromkeys(TOKEN_KEYS), **named})


def _remove_added_tokens(path: Path, count: int) -> None:
    """Remove tokens that transformers added to a tokenizer of `count` tokens; the model has no embeddings for them."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    original = [token for token in tokenizer["added_tokens"] if token["id"] < count]
    if len(original) < len(tokenizer["added_tokens"]):
        path.write_text(json.dumps({**tokenizer, "added_tokens": original}, ensure_ascii=False), encoding="utf-8")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
