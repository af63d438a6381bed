"""How likely tokens were, in the forms of the API; with the bytes of tokens that are parts of characters."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from h2o_stream.serve.stream import Logprob

_KEPT = 10_000
"""Descriptions of tokens that are kept: most lists have the same likely ones."""

_SPACE = "\u2581"
_PLAIN = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
_OTHERS = [byte for byte in range(256) if byte not in _PLAIN]
_BYTES = {chr(byte): byte for byte in _PLAIN} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
"""The letters by which byte-level vocabularies write bytes."""


class TokenTexts:
    """The bytes of tokens.

    Args:
        tokenizer: one of transformers, backed by the tokenizers library.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._added = self._backend.get_added_tokens_decoder()
        self._byte_level = "ByteLevel" in repr(self._backend.decoder)
        self.described = lru_cache(maxsize=_KEPT)(self._described)

    def bytes_of(self, token: int) -> bytes | None:
        """What a token stands for in a text; None for a control token, which is not shown."""
        if added := self._added.get(token):
            return None if added.special else str(added.content).encode()
        piece = self._backend.id_to_token(token) or ""
        if self._byte_level:
            return bytes(_BYTES[letter] for letter in piece if letter in _BYTES)
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):
            return bytes.fromhex(byte[1])
        return piece.replace(_SPACE, " ").encode()

    def _described(self, token: int) -> dict[str, Any]:
        """Both, in the form of chat completions."""
        shown = self.bytes_of(token)
        return {"token": self.text_of(token), "bytes": None if shown is None else list(shown)}

    def text_of(self, token: int) -> str:
        """The same, with an escape for each byte that is no character by itself; the name of a control token."""
        shown = self.bytes_of(token)
        return str(self._added[token].content) if shown is None else shown.decode("utf-8", "backslashreplace")


def chat_logprobs(texts: TokenTexts, logprobs: Iterable[Logprob]) -> dict[str, Any]:
    """In the form of chat completions."""

    def described(token: int, logprob: float) -> dict[str, Any]:
        return {**texts.described(token), "logprob": logprob}

    content = [
        {**described(x.token, x.logprob), "top_logprobs": [described(*likely) for likely in x.top]} for x in logprobs
    ]
    return {"content": content, "refusal": None}


class TextLogprobs:
    """In the form of completions, for one reply, which may come in parts."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts, self._decoder, self._offset = texts, codecs.getincrementaldecoder("utf-8")("replace"), 0

    def part(self, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        """Those of the next tokens."""
        offsets = list[int]()
        for each in logprobs:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._texts.bytes_of(each.token) or b""))
        text_of = self._texts.text_of
        return {
            "tokens": [text_of(x.token) for x in logprobs],
            "token_logprobs": [x.logprob for x in logprobs],
            "top_logprobs": [{text_of(token): value for token, value in x.top} for x in logprobs],
            "text_offset": offsets,
        }
