"""Converts the tokenizer of a GGUF file: byte-level BPE here, SentencePiece by `gguf_pieces`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from h2o_stream.errors import H2OStreamError, UnsupportedModelError
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.gguf_pieces import KINDS, MERGES, sentencepiece
from h2o_stream.models.gguf_pretokenizer import BYTES, pre_tokenizer
from h2o_stream.models.tokenizer import FileTokenizer
from h2o_stream.models.turn_tokens import NAMES, is_marker, is_unmistakable, missing_names
from h2o_stream.native.gguf_types import CONTROL, NORMAL, UNKNOWN, USER_DEFINED

TOKEN_KEYS = {
    name: f"tokenizer.ggml.{key}_token_id"
    for name, key in {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}.items()
}
"""Special tokens of transformers, and the keys of their ids in files."""

_MODEL, _TOKENS, _TYPES = (f"tokenizer.ggml.{name}" for name in ("model", "tokens", "token_type"))

_BYTE_LEVEL = "gpt2"
"""The usual kind of vocabulary, all others being KINDS of SentencePiece."""

_ALPHABET = frozenset(BYTES.alphabet())
"""The letters that stand for bytes."""

_COMPOSED = ("qwen2", "qwen35")
"""Pre-tokenizers of models whose text is composed (NFC) first, which files do not say."""


def gguf_tokenizer(file: GgufFile) -> FileTokenizer:
    """The tokenizer of a file.

    Raises:
        ModelNotFoundError: the metadata is damaged.
        UnsupportedModelError: its vocabulary is of another kind, or see `pre_tokenizer`.
    """
    kind = _required(file, _MODEL)
    if kind != _BYTE_LEVEL and kind not in KINDS:
        known = ", ".join((_BYTE_LEVEL, *KINDS))
        raise UnsupportedModelError(f"{file.path.name} has a vocabulary of the kind {kind!r} ({_MODEL}), not {known}")
    try:
        return _converted(file, kind)
    except H2OStreamError:
        raise
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise file.damaged((str(error) or type(error).__name__).splitlines()[0]) from error


def _required(file: GgufFile, key: str) -> Any:
    if key not in file.metadata:
        raise file.damaged(f"it has no {key}")
    return file.metadata[key]


def _converted(file: GgufFile, kind: str) -> FileTokenizer:
    _required(file, _TOKENS)
    tokens, types = file.array(_TOKENS), file.array(_TYPES)
    named = _named_tokens(file, tokens, types)
    special = {*named.values(), *(() if kind == _BYTE_LEVEL else _numbers_of(types, UNKNOWN))}
    added = _added_tokens(tokens, types, special)
    if kind == _BYTE_LEVEL:
        backend, adds_bos = _byte_level(file, tokens, added)
    else:
        backend, adds_bos = sentencepiece(file, tokens), True
    flags = {"bos_token": adds_bos, "eos_token": False}  # where the file says nothing, as llama.cpp
    flags = {name: bool(file.metadata.get(f"tokenizer.ggml.add_{name}", flag)) for name, flag in flags.items()}
    if kind == "gemma4":  # whose template writes it, though the flag is set
        flags["bos_token"] = False
    backend.post_processor = _post_processor(tokens, named, flags)
    backend.add_tokens([token for token in added.values() if backend.token_to_id(token.content) is not None])
    template: Any = file.metadata.get("tokenizer.chat_template")
    contents = {name: tokens[number] for name, number in named.items()}
    return FileTokenizer(backend, contents, template if isinstance(template, str) else None)


def _byte_level(file: GgufFile, tokens: Sequence[str], added: Collection[int]) -> tuple[Tokenizer, bool]:
    """The tokenizer of byte-level BPE, without special tokens, and whether texts begin with one by default.

    Tokens that are `added` are in the vocabulary as they are, all others in letters for bytes.
    """
    split, ignore_merges = pre_tokenizer(file)
    _required(file, MERGES)
    vocab = {
        token if number in added or _ALPHABET.issuperset(token) or is_marker(token) else _in_letters(token): number
        for number, token in enumerate(tokens)
    }
    merges = [_pair(merge) for merge in file.array(MERGES)]
    backend = Tokenizer(
        models.BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix="", ignore_merges=ignore_merges)
    )
    if file.metadata.get("tokenizer.ggml.pre") in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    return backend, ignore_merges


def _named_tokens(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """Ids of special tokens by transformers' names, if they are no ordinary text; those without an id by their text.

    Raises ModelNotFoundError if one is no id.
    """
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
    controls = {*special, *_numbers_of(types, CONTROL)}
    defined = {*_numbers_of(types, USER_DEFINED)}
    return {
        number: AddedToken(tokens[number], normalized=False, special=number in controls)
        for number in sorted(controls | defined)
    }


def _numbers_of(types: Sequence[int], kind: int) -> Iterator[int]:
    """The ids of the tokens of a type."""
    return (number for number, each in enumerate(types) if each == kind)


def _in_letters(token: str) -> str:
    return "".join(piece for piece, _ in BYTES.pre_tokenize_str(token))


def _pair(merge: str) -> tuple[str, str]:
    first, second = merge.split(" ")
    return first, second


def _post_processor(
    tokens: Sequence[str], named: Mapping[str, int], added: Mapping[str, bool]
) -> processors.TemplateProcessing:
    """Adds the special tokens with which a text begins or ends, if they are `added`."""
    ids = {name: named[name] for name, wanted in added.items() if wanted and name in named}
    begin, end = ([tokens[ids[name]]] if name in ids else [] for name in ("bos_token", "eos_token"))

    def framed(sequence: str, number: int) -> list[str]:
        return [f"{piece}:{number}" for piece in (*begin, sequence, *end)]

    return processors.TemplateProcessing(
        single=framed("$A", 0),
        pair=[*framed("$A", 0), *framed("$B", 1)],
        special_tokens=[(tokens[number], number) for number in ids.values()],
    )
