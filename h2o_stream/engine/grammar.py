"""JSON schemas and other grammars: which tokens may come next in a reply. The grammars are those of llguidance."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
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
        rules: a JSON schema, or a text in llguidance's form of Lark.

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
        self._ends = ends = tuple(sorted(end_tokens))
        try:
            grammar = (
                LLMatcher.grammar_from_lark(rules)
                if isinstance(rules, str)
                else LLMatcher.grammar_from_json_schema(json.dumps(rules))
            )
        except ValueError as error:
            raise DataError(f"the JSON schema is not supported: {error}") from error
        self._matcher = LLMatcher(_guided(tokenizer.backend_tokenizer.to_str(), vocabulary, ends), grammar, log_level=0)
        if self._matcher.is_error():
            raise DataError(f"the JSON schema is not supported: {self._matcher.get_error().splitlines()[0]}")

    def matcher(self) -> Matcher:
        """For a reply that begins."""
        return Matcher(self._matcher.deep_copy(), self._ends)


class Matcher:
    """A reply that follows a grammar, token by token. See `Grammar`.

    It ends as soon as it may where the model would go on with something else: a list that could go on does so only if
    the model itself would.
    """

    def __init__(self, matcher: Any, end_tokens: Sequence[int]) -> None:
        self._matcher, self._ends = matcher, list(end_tokens)

    def masked(self, logits: NDArray[numpy.float32]) -> NDArray[numpy.float32]:
        """A copy of logits [V], in which tokens that must not come next are -inf."""
        mask = numpy.frombuffer(self._matcher.compute_bitmask(), numpy.uint8)
        allowed = numpy.unpackbits(mask, bitorder="little")[: len(logits)].astype(bool)
        if allowed[self._ends].any() and not allowed[logits.argmax()]:
            ended = numpy.zeros_like(allowed)
            ended[self._ends] = allowed[self._ends]
            allowed = ended
        return numpy.where(allowed, logits, numpy.float32(-numpy.inf))

    def accept(self, token: int) -> None:
        """Append the sampled token."""
        self._matcher.consume_token(token)


@lru_cache(maxsize=2)
def _guided(serialized: str, vocabulary: int, end_tokens: tuple[int, ...]) -> Any:
    """Llguidance's tokenizer; making it takes a second for large vocabularies."""
    from llguidance import LLTokenizer

    return LLTokenizer(serialized, vocabulary, list(end_tokens))
