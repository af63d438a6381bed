"""Vocabularies of SentencePiece in GGUF files, as transformers converts them: pieces with scores, merged as BPE.

Spaces are written as ▁, and what has no piece is spelled in bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from h2o_stream.base.measurements import LONG_S, read_measurement, save_measurement
from h2o_stream.base.resources import version_of
from h2o_stream.models.file_identity import model_identity
from h2o_stream.models.gguf import GgufFile

KINDS = ("llama", "gemma4")
"""Their names in ``tokenizer.ggml.model``."""

MERGES = "tokenizer.ggml.merges"
_SCORES = "tokenizer.ggml.scores"
_SPACE = "▁"


def sentencepiece(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    """The tokenizer of pieces, by id, without special tokens; one that takes long to make is kept for later starts.

    Raises ModelNotFoundError if nothing says how pieces merge.
    """
    key, begun = f"{model_identity(file)} {version_of('tokenizers')}", time.perf_counter()
    if kept := read_measurement("pieces", key):
        return Tokenizer.from_str(kept)
    made = _made(file, tokens)
    if time.perf_counter() - begun > LONG_S:
        save_measurement("pieces", key, made.to_str())
    return made


def _made(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    """Gemma writes no space before a text, and merges in the order of its vocabulary. Phi 3 writes one before any text,
    others unless the text begins with a space.
    """
    family = file.architecture
    is_gemma = family.startswith("gemma")
    if is_gemma:
        tokens = [_SPACE * len(token) if " " in token and not token.strip() else token for token in tokens]
    vocab = {token: number for number, token in enumerate(tokens)}
    if MERGES in file.metadata:
        merges = [(first, second) for first, _, second in (merge.partition(" ") for merge in file.array(MERGES))]
    elif is_gemma:
        merges = [*_merges(vocab, {token: -number for token, number in vocab.items()})]
    elif _SCORES in file.metadata:
        merges = [*_merges(vocab, dict(zip(tokens, file.array(_SCORES), strict=True)))]
    else:
        raise file.damaged(f"it has neither {_SCORES} nor {MERGES}")
    unknown = {"unk_token": "<unk>"} if is_gemma else {}
    backend = Tokenizer(models.BPE(vocab, merges, fuse_unk=True, byte_fallback=True, **unknown))
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if is_gemma:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif family == "phi3":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(decoding if is_gemma else [*decoding, decoders.Strip(" ", left=1)])
    return backend


def _merges(vocab: Mapping[str, int], scores: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """The pairs of pieces that make another one, those of the highest scores first."""
    ranked = list[tuple[float, int, int, str, str]]()
    for piece, score in scores.items():
        pairs = [
            (vocab[first], vocab[second], first, second)
            for place in range(1, len(piece))
            if (second := piece[place:]) in vocab and (first := piece[:place]) in vocab
        ]
        ranked += [(score, len(first), len(second), first, second) for *_, first, second in sorted(pairs)]
    ranked.sort(key=itemgetter(0, 1, 2), reverse=True)
    return ((first, second) for *_, first, second in ranked)
