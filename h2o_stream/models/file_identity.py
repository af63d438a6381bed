"""The identity of a model's files: one digest, after which everything derived from them is named."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from h2o_stream.base.json_text import parse_json
from h2o_stream.models.gguf import GgufFile, gguf_parts
from h2o_stream.models.other_tools import is_gguf

_SAMPLE_BYTES = 4096
_NUM_SPREAD = 256
"""Samples at equal distances, besides one in the middle of every tensor."""

_CONFIGS, _WEIGHTS = (".json",), (".safetensors", ".bin")

_digests: dict[tuple[int, ...], bytes] = {}
"""Digests of this process by what they cover, device, inode, size, times of the last changes of content and inode."""


def model_identity(model: Path | GgufFile) -> str:
    """16 hex digits that identify a GGUF file by its content, or the weights and configs in a folder.

    They cover size and time of the last change; all metadata and tensor infos; configs whole; and 4 KiB from the middle
    of every tensor and from 256 places at equal distances. Where a file lies makes no difference.

    What cannot be detected: weights that differ only between these samples, in files of equal size and time.

    Raises:
        ModelNotFoundError: a GGUF file is damaged.
        OSError: a file cannot be read.
    """
    return _identity(model.path, model) if isinstance(model, GgufFile) else _identity(model, None)


def _identity(path: Path, gguf: GgufFile | None, timeless: bool = False) -> str:
    if path.is_dir():
        named = (file.name.encode() + _digest(file, None, timeless) for file in _model_files(path))
        return hashlib.sha256(b"".join(named)).hexdigest()[:16]
    first, *others = (_digest(part, gguf, timeless) for part in gguf_parts(path))
    return (hashlib.sha256(b"".join((first, *others))).digest() if others else first).hex()[:16]


def _model_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in _CONFIGS + _WEIGHTS)


def content_identity(path: Path) -> str:
    """A `model_identity` that does not depend on when files were last changed."""
    return _identity(path, None, timeless=True)


def file_digest(path: Path, variant: str) -> str:
    """Identifies a model in states by its file or folder, wherever it lies, and by the variant that was loaded: the
    dtype of what is not packed, and for a checkpoint how it is packed.
    """
    return f"file {content_identity(path)} {variant}"


def _digest(path: Path, gguf: GgufFile | None, timeless: bool) -> bytes:
    """The digest of a file, with the time of its last change or `timeless`; computed once unless the file changes."""
    stat = path.stat()
    key = (timeless, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    if key not in _digests:
        _digests[key] = _hashed(path, gguf, f"{stat.st_size}" if timeless else f"{stat.st_size} {stat.st_mtime_ns}")
    return _digests[key]


def _hashed(path: Path, gguf: GgufFile | None, begin: str) -> bytes:
    """The digest of a text and of what `_covered` gives."""
    digest = hashlib.sha256(begin.encode())
    with path.open("rb") as file:
        for start, count in _covered(path, file, path.stat().st_size, gguf):
            file.seek(start)
            digest.update(file.read(count))
    return digest.digest()


def _covered(path: Path, file: BinaryIO, size: int, gguf: GgufFile | None) -> Iterator[tuple[int, int]]:
    """Start and size of everything that the digest covers."""
    if path.suffix in _CONFIGS:
        yield 0, size
        return
    if gguf is None and is_gguf(path):
        gguf = GgufFile(path)
    if gguf is not None:
        part = gguf_parts(path).index(path)
        spans = [(tensor.offset, tensor.nbytes) for tensor in gguf.tensors.values() if tensor.part == part]
    else:
        spans = _safetensors_spans(file, size) if path.suffix == ".safetensors" else []
    yield 0, min((start for start, _ in spans), default=_SAMPLE_BYTES)
    spread = [size * index // _NUM_SPREAD for index in range(_NUM_SPREAD)]
    middles = [start + max(0, nbytes - _SAMPLE_BYTES) // 2 for start, nbytes in spans]
    for start in sorted({*spread, *middles, max(0, size - _SAMPLE_BYTES)}):
        yield start, _SAMPLE_BYTES


def _safetensors_spans(file: BinaryIO, size: int) -> list[tuple[int, int]]:
    """Start and size of every tensor; nothing if the header is damaged, which loading reports."""
    length = int.from_bytes(file.read(8), "little")
    if length > size:
        return []
    try:
        header: dict[str, Any] = parse_json(file.read(length))
        offsets = [info["data_offsets"] for name, info in header.items() if name != "__metadata__"]
        spans = [(8 + length + start, end - start) for start, end in offsets]
        return spans if all(0 <= start <= start + count <= size for start, count in spans) else []
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return []
