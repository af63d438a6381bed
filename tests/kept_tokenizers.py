"""Keeps the tokenizers that models are loaded with: reading one of 49,152 entries takes 0.25 s of every command.

With torch and without, from folders and from the embedded model's file.
"""

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import h2o_stream.loading.transformers_model
from h2o_stream.models import file_tokenizers, gguf_tokenizer
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.tokenizer import FileTokenizer
from h2o_stream.models.turn_tokens import mark_controls
from h2o_stream.recall import terms
from h2o_stream.session import control_tokens

_kept: dict[object, Any] = {}

_LARGE = 2**24
"""Bytes; smaller files have small vocabularies."""


class KeptTokenizers:
    """Stands in for a class of tokenizers: files that were read before are not read again."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def from_pretrained(self, source: str, **more: Any) -> Any:
        content = _contents(Path(source)) if Path(source, "tokenizer_config.json").exists() else None
        if content is None:
            return self._kind.from_pretrained(source, **more)
        return _keep((self._kind, content), lambda: self._kind.from_pretrained(source, **more))


def keep_tokenizers() -> None:
    names = vars(h2o_stream.loading.transformers_model)
    names["AutoTokenizer"] = KeptTokenizers(names["AutoTokenizer"])
    from_folder, from_file = FileTokenizer.from_folder, gguf_tokenizer.gguf_tokenizer

    def of_folder(cls: type[FileTokenizer], folder: Path) -> Any:
        texts = sorted(path for pattern in ("tokenizer*.json", "**/*.jinja") for path in folder.glob(pattern))
        content = tuple((str(path.relative_to(folder)), path.read_bytes()) for path in texts if path.is_file())
        return _keep((cls, content), lambda: from_folder(folder))

    def of_file(file: GgufFile) -> Any:
        seen = file.path.stat()
        if seen.st_size < _LARGE:
            return from_file(file)
        return _keep((file.path, seen.st_ino, seen.st_mtime_ns), lambda: from_file(file))

    FileTokenizer.from_folder = classmethod(of_folder)  # type: ignore[assignment]
    names["gguf_tokenizer"] = vars(file_tokenizers)["gguf_tokenizer"] = of_file
    for module, name in ((terms, "_words_of"), (control_tokens, "_with_secret_names")):
        vars(module)[name] = cache(vars(module)[name].__wrapped__)  # a test has another tokenizer than the one before


def _keep(key: object, read: Callable[[], Any]) -> Any:
    kept, before = _kept.get(key, (None, None))
    if kept is None or _added(kept) != before:  # copies share their added tokens, and one was given more
        kept = read()
        if kept is None:
            return None
        mark_controls(kept)
        _kept[key] = kept, _added(kept)
    return copy.copy(kept)


def _added(tokenizer: Any) -> list[tuple[int, str, bool]]:
    tokens = tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
    return [(number, token.content, token.special) for number, token in tokens]


def _contents(folder: Path) -> object:
    """What a tokenizer depends on, or None if the configuration cannot be read."""
    try:
        kind = json.loads((folder / "config.json").read_bytes())["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    others = ("config.json", "generation_config.json")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".safetensors"]
    return kind, tuple((str(path.relative_to(folder)), path.read_bytes()) for path in files if path.name not in others)
