"""Converts a GGUF file to a safetensors folder in the user's cache, once.

transformers reads and de-quantizes the file; this module makes the conversion atomic and safe when two
programs start it at the same time.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from h2o_stream.errors import H2OStreamError, ModelNotFoundError, UnsupportedModelError
from h2o_stream.resources import cache_folder

_LARGE_BYTES = 1 << 30
"""Above this size of the GGUF file the copy is bfloat16, below it float32, which loses nothing."""


def converted(source: Path, key: str, notify: Callable[[str], None]) -> Path:
    """The folder with `source` in transformers' form; converts it if that was not done yet.

    Args:
        source: a GGUF file.
        key: name of the folder; changes with the content of the file.
        notify: told when a conversion starts, waits or ends.

    Raises:
        ModelNotFoundError: the file is not a readable GGUF file.
        UnsupportedModelError: transformers cannot read its architecture.
        H2OStreamError: the copy cannot be written.
    """
    parent = cache_folder() / "models"
    folder = parent / key
    if folder.exists():
        return folder
    _check_magic(source)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(parent / f"{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            notify(f"Another program is converting {source.name}, waiting for it ...")
            lock.acquire()
        try:
            if not folder.exists():
                _convert(source, folder, notify)
        finally:
            lock.release()
    except OSError as error:
        raise H2OStreamError(f"{source.name} could not be converted into {parent}: {error}") from error
    return folder


def _check_magic(source: Path) -> None:
    with source.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelNotFoundError(f"{source} is not a GGUF file: it starts with {magic!r}")


def _convert(source: Path, folder: Path, notify: Callable[[str], None]) -> None:
    for leftover in folder.parent.glob(f".{folder.name}.*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    notify(f"Converting {source.name} for faster starts (once) ...")
    begun = time.perf_counter()
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        _dequantize(source, partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    notify(f"Converted in {time.perf_counter() - begun:.0f} s.")


def _dequantize(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    dtype = torch.bfloat16 if source.stat().st_size > _LARGE_BYTES else torch.float32
    folder, name = str(source.parent), source.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        quantized = GgufConfig(gguf_file=name, dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, quantization_config=quantized, dtype=dtype)
    except OSError:
        raise
    except Exception as error:  # what a damaged file makes of a parser is anyone's guess
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if "architecture" in reason or "model type" in reason:
            raise UnsupportedModelError(f"{name} cannot be served: {reason}") from error
        raise ModelNotFoundError(f"{source} is damaged or not readable as GGUF: {reason}") from error
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)
