"""Converts the tokenizer of a GGUF file: vocabularies of byte-level BPE here, others by transformers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from h2o_stream.errors import H2OStreamError
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.gguf_pretokenizer import BYTES, pre_tokenizer
from h2o_stream.models.tokenizer import FileTokenizer
from h2o_stream.models.turn_tokens import NAMES, is_marker, is_unmistakable, missing_names
from h2o_stream.native.gguf_types import CONTROL, NORMAL, USER_DEFINED

TOKEN_KEYS = {
    name: f"tokenizer.ggml.{key}_token_id"
    for name, key in {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}.items()
}
"""Special tokens of transformers, and the keys of their ids in files."""

_TOKENS, _TYPES, _MERGES = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges"))

_ALPHABET = frozenset(BYTES.alphabet())
"""The letters that stand for bytes."""

_COMPOSED = ("qwen2", "qwen35")
"""Pre-tokenizers of models whose text is composed (NFC) first, which files do not say."""


def byte_level_tokenizer(file: GgufFile) -> FileTokenizer | None:
    """The tokenizer of a file; None if its vocabulary is not byte-level BPE.

    Control tokens, and those defined by users, are in the vocabulary as they are, all others in letters for bytes.

    Raises:
        ModelNotFoundError: the metadata is damaged.
        UnsupportedModelError: see `pre_tokenizer`.
    """
    if file.metadata.get("tokenizer.ggml.model") != "gpt2":
        return None
    split, ignore_merges = pre_tokenizer(file)
    for key in (_TOKENS, _MERGES):
        if key not in file.metadata:
            raise file.damaged(f"it has no {key}")
    try:
        return _converted(file, split, ignore_merges)
    except H2OStreamError:
        raise
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise file.damaged((str(error) or type(error).__name__).splitlines()[0]) from error


def _converted(file: GgufFile, split: PreTokenizer, ignore_merges: bool) -> FileTokenizer:
    tokens, types = file.array(_TOKENS), file.array(_TYPES)
    named = _named_tokens(file, tokens, types)
    added = _added_tokens(tokens, types, set(named.values()))
    vocab = {
        token if number in added or _ALPHABET.issuperset(token) or is_marker(token) else _in_letters(token): number
        for number, token in enumerate(tokens)
    }
    merges = [_pair(merge) for merge in file.array(_MERGES)]
    backend = Tokenizer(
        models.BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix="", ignore_merges=ignore_merges)
    )
    if file.metadata.get("tokenizer.ggml.pre") in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = _post_processor(file, tokens, named, default_bos=ignore_merges)
    backend.add_tokens(list(added.values()))
    template: Any = file.metadata.get("tokenizer.chat_template")
    contents = {name: tokens[number] for name, number in named.items()}
    return FileTokenizer(backend, contents, template if isinstance(template, str) else None)


def named_tokens(file: GgufFile) -> dict[str, int]:
    """Ids of special tokens by transformers' names, if they are no ordinary text; those without an id by their text.

    Raises ModelNotFoundError if one is no id.
    """
    return _named_tokens(file, file.array(_TOKENS), file.array(_TYPES))


def _named_tokens(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    named = {name: file.metadata[key] for name, key in TOKEN_KEYS.items() if key in file.metadata}
    for name, number in named.items():
        if type(number) is not int or not 0 <= number < len(tokens):
            raise file.damaged(f"{TOKEN_KEYS[name]} is {number!r}, not one of {len(tokens)} tokens")

    def is_text(number: int) -> bool:
        """Whether an entry is ordinary, or of no type."""
        return types[number : number + 1] in ([NORMAL], [])

    named = {name: number for name, number in named.items() if is_marker(tokens[number]) or not is_text(number)}

    known = {text: number for number, text in enumerate(tokens) if text in NAMES}
    controls = {text for text, number in known.items() if is_unmistakable(text) or not is_text(number)}
    return named | {name: known[text] for name, text in missing_names(named, controls).items()}


def _added_tokens(tokens: Sequence[str], types: Sequence[int], special: Collection[int]) -> dict[int, AddedToken]:
    """Tokens that stay whole in any text, by id: control tokens, those defined by users, and these special ones."""
    controls = {*special, *(number for number, kind in enumerate(types) if kind == CONTROL)}
    defined = {number for number, kind in enumerate(types) if kind == USER_DEFINED}
    return {
        number: AddedToken(tokens[number], normalized=False, special=number in controls)
        for number in sorted(controls | defined)
    }


def _in_letters(token: str) -> str:
    return "".join(piece for piece, _ in BYTES.pre_tokenize_str(token))


def _pair(merge: str) -> tuple[str, str]:
    first, second = merge.split(" ")
    return first, second


def _post_processor(
    file: GgufFile, tokens: Sequence[str], named: Mapping[str, int], default_bos: bool
) -> processors.TemplateProcessing:
    """Adds the special tokens with which the file says that a text begins or ends; the default is llama.cpp's."""
    defaults = {"bos_token": default_bos, "eos_token": False}
    wanted = [name for name in defaults if file.metadata.get(f"tokenizer.ggml.add_{name}", defaults[name])]
    ids = {name: named[name] for name in wanted if name in named}
    begin, end = ([tokens[ids[name]]] if name in ids else [] for name in ("bos_token", "eos_token"))

    def framed(sequence: str, number: int) -> list[str]:
        return [f"{piece}:{number}" for piece in (*begin, sequence, *end)]

    return processors.TemplateProcessing(
        single=framed("$A", 0),
        pair=[*framed("$A", 0), *framed("$B", 1)],
        special_tokens=[(tokens[number], number) for number in ids.values()],
    )
