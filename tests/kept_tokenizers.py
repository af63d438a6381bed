"""Keeps the tokenizers that models are loaded with: reading one of 49,152 entries takes 0.25 s of every command."""

import copy
import json
from pathlib import Path
from typing import Any

import h2o_stream.models.load

_kept: dict[object, Any] = {}


class KeptTokenizers:
    """Stands in for a class of tokenizers: files that were read before are not read again."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def from_pretrained(self, source: str, **more: Any) -> Any:
        content = _contents(Path(source)) if Path(source, "tokenizer_config.json").exists() else None
        if content is None:
            return self._kind.from_pretrained(source, **more)
        key = self._kind, content
        if key not in _kept:
            _kept[key] = self._kind.from_pretrained(source, **more)
        return copy.copy(_kept[key])


def keep_tokenizers() -> None:
    names = vars(h2o_stream.models.load)
    for name in ("AutoTokenizer", "PreTrainedTokenizerFast"):
        names[name] = KeptTokenizers(names[name])


def _contents(folder: Path) -> object:
    """What a tokenizer depends on, or None if the configuration cannot be read."""
    try:
        kind = json.loads((folder / "config.json").read_bytes())["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    others = ("config.json", "generation_config.json")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".safetensors"]
    return kind, tuple((str(path.relative_to(folder)), path.read_bytes()) for path in files if path.name not in others)
