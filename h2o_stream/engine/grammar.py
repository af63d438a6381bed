"""JSON schemas and other grammars: which tokens may come next in a reply. The grammars are those of llguidance."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream.errors import ConfigError, DataError


class Grammar:
    """A grammar for one model's replies.

    Args:
        tokenizer: of the model.
        end_tokens: that end a turn; they are allowed where the text may end.
        vocabulary: number of logits.
        rules: a JSON schema, or a text in llguidance's form of Lark, or in llama.cpp's (GBNF).

    Raises:
        ConfigError: llguidance is not installed.
        DataError: it is no grammar, or has something that is not supported.
    """

    def __init__(
        self, tokenizer: Any, end_tokens: Collection[int], vocabulary: int, rules: Mapping[str, Any] | str
    ) -> None:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise ConfigError("JSON schemas need llguidance; pip install 'h2o-stream[json]'") from error
        ends, what = tuple(sorted(end_tokens)), "grammar" if isinstance(rules, str) else "JSON schema"
        try:
            grammar = (
                LLMatcher.grammar_from_lark(_as_lark(rules))
                if isinstance(rules, str)
                else LLMatcher.grammar_from_json_schema(json.dumps(rules))
            )
        except ValueError as error:
            raise DataError(f"the {what} is not supported: {error}") from error
        self._matcher = LLMatcher(_guided(tokenizer.backend_tokenizer.to_str(), vocabulary, ends), grammar, log_level=0)
        if self._matcher.is_error():
            raise DataError(f"the {what} is not supported: {self._matcher.get_error().splitlines()[0]}")

    def matcher(self) -> Matcher:
        """For a reply that begins."""
        return Matcher(self._matcher.deep_copy())


class Matcher:
    """A reply that follows a grammar, token by token. See `Grammar`."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def masked(self, logits: NDArray[numpy.float32]) -> NDArray[numpy.float32]:
        """A copy of logits [V], in which tokens that must not come next are -inf."""
        mask = numpy.frombuffer(self._matcher.compute_bitmask(), numpy.uint8)
        allowed = numpy.unpackbits(mask, bitorder="little")[: len(logits)].astype(bool)
        return numpy.where(allowed, logits, numpy.float32(-numpy.inf))

    def accept(self, token: int) -> None:
        """Append the sampled token."""
        self._matcher.consume_token(token)


def _as_lark(rules: str) -> str:
    """A grammar in the form of Lark.

    Raises:
        ValueError: it is no grammar.
    """
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(rules))
    except Exception as error:  # its parser raises whatever it meets
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


@lru_cache(maxsize=2)
def _guided(serialized: str, vocabulary: int, end_tokens: tuple[int, ...]) -> Any:
    """Llguidance's tokenizer; making it takes a second for large vocabularies."""
    from llguidance import LLTokenizer

    return LLTokenizer(serialized, vocabulary, list(end_tokens))
