"""Decides which tokenizers can be read without transformers and encode as those of transformers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.gguf_pretokenizer import BYTES, QWEN2
from h2o_stream.models.gguf_tokenizer import gguf_tokenizer
from h2o_stream.models.tokenizer import FileTokenizer, read_object

_GENERAL = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes of transformers that take ``tokenizer.json`` as it is. Others take only its vocabulary from it."""

_QWEN_MODELS = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Types of models whose tokenizer transformers may take for Qwen2's, whatever its config says."""

_PARTS: dict[str, tuple[Any, Any, Any]] = {
    "Qwen2Tokenizer": (
        normalizers.NFC(),
        Sequence([Split(Regex(QWEN2), "isolated"), BYTES]),
        decoders.ByteLevel(),
    ),
    "GPT2Tokenizer": (None, ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
}
"""Normalizer, pre-tokenizer and decoder that such classes bring."""

_NAMES = {"unk_token", "bos_token", "eos_token", "pad_token"}
"""Special tokens for which they have defaults."""

_FLAGS = ("byte_fallback", "fuse_unk", "ignore_merges", "unk_token")
"""What their vocabulary does without."""


def file_tokenizer(source: Path | GgufFile) -> FileTokenizer | None:
    """The tokenizer of a GGUF file or of a model's folder; None if only transformers can tell what it is.

    Raises:
        ModelNotFoundError: a file is damaged.
        UnsupportedModelError: see `gguf_tokenizer`.
    """
    if isinstance(source, GgufFile):
        return gguf_tokenizer(source)
    if not (source / "tokenizer.json").exists():
        return None
    tokenizer = FileTokenizer.from_folder(source)
    return tokenizer if _is_read_as_saved(source, tokenizer.backend_tokenizer) else None


def _is_read_as_saved(folder: Path, backend: Tokenizer) -> bool:
    """Whether transformers would make this tokenizer of a folder."""
    config = read_object(folder / "tokenizer_config.json")
    kind = config.get("tokenizer_class")
    if read_object(folder / "config.json").get("model_type") in _QWEN_MODELS:
        kind = "Qwen2Tokenizer"
    if kind in _GENERAL:
        return True
    parts = _PARTS.get(str(kind).removesuffix("Fast"))
    if parts is None or not config.keys() >= _NAMES or config.get("add_prefix_space"):
        return False
    if any(getattr(backend.model, flag, True) for flag in _FLAGS):
        return False
    return [*map(_state, parts)] == [*map(_state, (backend.normalizer, backend.pre_tokenizer, backend.decoder))]


def _state(part: Any) -> bytes | None:
    """The definition of a part of a tokenizer."""
    return None if part is None else part.__getstate__()
