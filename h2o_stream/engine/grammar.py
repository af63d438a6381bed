"""JSON schemas and other grammars: which tokens may come next in a reply. The grammars are those of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy
from numpy.typing import NDArray

from h2o_stream.errors import ConfigError, DataError


class Thinking(Protocol):
    """How thinking is marked, see `session.thinking.Markers`."""

    @property
    def opening(self) -> str:
        """What begins it."""

    @property
    def closing(self) -> str:
        """What ends it."""

    @property
    def skipped(self) -> tuple[str, ...]:
        """What else may come before the answer."""

    @property
    def ending(self) -> str:
        """What may come after the answer, or nothing."""


class Grammar:
    """A grammar for one model's replies.

    Args:
        tokenizer: of the model.
        end_tokens: that end a turn; they are allowed where the text may end.
        vocabulary: number of logits.
        rules: a JSON schema, or a text in llguidance's form of Lark.
        thinking: how the model marks its thinking, which may come first and follows no rules; None if it has to answer.

    Raises:
        ConfigError: llguidance is not installed.
        DataError: it is no grammar, or has something that is not supported.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_tokens: Collection[int],
        vocabulary: int,
        rules: Mapping[str, Any] | str,
        thinking: Thinking | None = None,
    ) -> None:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise ConfigError("JSON schemas need llguidance; pip install 'h2o-stream[json]'") from error
        ends = tuple(sorted(end_tokens))
        try:
            grammar = (
                LLMatcher.grammar_from_lark(rules)
                if isinstance(rules, str)
                else LLMatcher.grammar_from_json_schema(json.dumps(rules))
            )
        except ValueError as error:
            raise DataError(f"the JSON schema is not supported: {error}") from error
        guided = _guided(tokenizer.backend_tokenizer.to_str(), vocabulary, ends)
        self._opening: list[int] = []
        if thinking is not None:
            added = tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
            special = {token.content: number for number, token in added if guided.is_special_token(number)}
            content = {"lark_grammar": grammar} if isinstance(rules, str) else {"json_schema": dict(rules)}
            grammar = _after_thinking(content, thinking, special)
            self._opening = tokenizer(thinking.opening, add_special_tokens=False)["input_ids"]
        self._matcher = LLMatcher(guided, grammar, log_level=0)
        if self._matcher.is_error():
            raise DataError(f"the JSON schema is not supported: {self._matcher.get_error().splitlines()[0]}")

    def matcher(self, thinking: bool = False) -> Matcher:
        """For a reply that begins, or whose thinking has been begun by its prompt."""
        matcher = Matcher(self._matcher.deep_copy())
        for token in self._opening if thinking else ():
            matcher.accept(token)
        return matcher


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


@lru_cache(maxsize=2)
def _guided(serialized: str, vocabulary: int, end_tokens: tuple[int, ...]) -> Any:
    """Llguidance's tokenizer; making it takes a second for large vocabularies."""
    from llguidance import LLTokenizer

    return LLTokenizer(serialized, vocabulary, list(end_tokens))


def literal(text: str, special: Mapping[str, int]) -> str:
    """A text in the form of Lark. Special tokens, given by their texts, have numbers there and are not text."""
    return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in _parts(text, special))


def _parts(text: str, special: Mapping[str, int]) -> list[str]:
    """The special tokens in a text, and what is between them."""
    names = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)"
    return [part for part in re.split(f"({names})", text) if part]


def _after_thinking(content: Mapping[str, Any], thinking: Thinking, special: Mapping[str, int]) -> str:
    """A grammar of llguidance in which thinking, once or several times, may come before what another one describes.

    Thinking is any text without special tokens, up to the text or the token that ends it.
    """
    write = partial(literal, special=special)
    first, *others = _parts(thinking.closing, special)
    text, rest = ("", thinking.closing) if first in special else (first, "".join(others))
    until = re.escape(text).replace("/", r"\/")
    ending = f"(GAP? {write(thinking.ending)})?" if thinking.ending else ""
    rules = [
        "%llguidance {}",
        f"start: before* @content {ending}",
        " | ".join(("before: GAP? thought GAP?", *(f"{write(skipped)} GAP?" for skipped in thinking.skipped))),
        f"thought: {write(thinking.opening)} free {write(rest)}",
        f"free{'[lazy]' if text else ''}: /(.|\\n)*{until}/",
        "GAP: /\\s{1,8}/",
    ]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, {**content, "name": "content"}]})
