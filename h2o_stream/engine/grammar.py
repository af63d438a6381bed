"""JSON schemas and other grammars: which tokens may come next in a reply. The grammars are those of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from h2o_stream.base.token_texts import TokenTextStream
from h2o_stream.config import FORCED, STRUCTURE
from h2o_stream.engine.logits import BANNED
from h2o_stream.engine.text import Markers
from h2o_stream.errors import DataError

_SAMPLE = (
    '{\n  "a": 1,\n  "b": "c",\n  "d": [\n    {\n      "e": "f",\n      "g": 1\n    },\n    {\n      "e": "f"\n    }\n'
    '  ],\n  "h":'
)
"""JSON as models write it, with names of its own. Its last token ends a name, and `_LETTER` ends with a letter."""

_LETTER = '{"a'

_SPACE = {"whitespace_pattern": r"\r?\n?[ \t]{0,40}"}
"""Of JSON, for llguidance: a line and its indentation. A model that wants to end an object before all of its properties
are there writes space for ever where it may.
"""


class Guess(NamedTuple):
    """A token that may come next; the length of the sequence that it followed before, or `STRUCTURE` or `FORCED`."""

    token: int
    length: int


Follow = Callable[[Sequence[Guess]], Iterable[list[Guess]]]
"""What may follow after some guesses: the likeliest sequence first, and others that begin otherwise."""


class Grammar:
    """A grammar for one model's replies.

    Args:
        end_tokens: tokens that end a turn; they are allowed where the text may end.
        rules: a JSON schema, or a text in llguidance's form of Lark, or in llama.cpp's (GBNF).
        thinking: how the model marks its thinking, which may come first and follows no rules; None if it has to answer.

    Raises:
        DataError: it is no grammar, or has something that is not supported.
    """

    ready = True
    """Whether its matchers answer at once."""

    def __init__(
        self,
        tokenizer: Any,
        end_tokens: Collection[int],
        vocabulary: int,
        rules: Mapping[str, Any] | str,
        thinking: Markers | None = None,
    ) -> None:
        self._ends = tuple(sorted(end_tokens))
        self._tokenizer, self._thinking = tokenizer, thinking
        sample, letter = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (_SAMPLE, _LETTER))
        self._sample = Sample(sample if isinstance(rules, Mapping) else (), letter[-1:])
        self._matcher, self._free = self._compile(vocabulary, rules)

    def _compile(self, vocabulary: int, rules: Mapping[str, Any] | str) -> tuple[Any, Any]:
        """Llguidance's matchers, without thinking and after it; None if there is none."""
        tokenizer = guided(self._tokenizer.backend_tokenizer.to_str(), vocabulary, self._ends)
        return compile_rules(tokenizer, added_texts(self._tokenizer), rules, self._thinking)

    def matcher(self, thinking: bool = False) -> Matcher:
        """For a reply that begins, or whose thinking has been begun by its prompt."""
        strict = Matcher(self._matcher.deep_copy(), self._ends, self._sample)
        if self._thinking is None or self._free is None:
            return strict
        begun = self._thinking.opening if thinking else ""
        free = Matcher(self._free.deep_copy(), self._ends, self._sample)
        return ThinkingMatcher(free, strict, self._thinking, self._tokenizer, self._ends, begun, self._sample)


class Sample(NamedTuple):
    """Tokens of a text like those that a grammar describes, and one that stands in free text only."""

    tokens: Sequence[int]
    letter: Sequence[int]


class Matcher:
    """A reply that follows a grammar, token by token. See `Grammar`.

    It ends as soon as it may where the model would go on with something else: a list that could go on does so only if
    the model itself would.

    Attributes:
        sample: what may follow can be guessed from it.
    """

    def __init__(self, matcher: Any, end_tokens: Sequence[int], sample: Sample) -> None:
        self._matcher, self._ends, self.sample = matcher, list(end_tokens), sample

    def allowed(self, size: int) -> NDArray[numpy.bool_]:
        """Which of `size` tokens may come next."""
        mask = numpy.frombuffer(self._matcher.compute_bitmask(), numpy.uint8)
        return numpy.unpackbits(mask, bitorder="little")[:size].astype(bool)

    def masked(self, logits: NDArray[numpy.float32]) -> NDArray[numpy.float32]:
        """A copy of logits [V], in which tokens that must not come next are -inf."""
        return _masked(logits, self.allowed(len(logits)), self._ends)

    def accept(self, token: int) -> None:
        """Append the sampled token."""
        self._matcher.consume_token(token)

    def foresee(self, follow: Follow, max_guesses: int) -> list[Guess]:
        """Tokens that may come next, at most so many: those of text that must, which may be divided into others, too;
        and between them what `follow` gives, or what ends a name, as far as it is allowed.
        """
        matcher, guesses, likely = self._matcher, list[Guess](), list[Guess]()
        while len(guesses) < max_guesses:
            if forced := matcher.compute_ff_tokens():
                likely = [Guess(token, FORCED) for token in forced]
            elif not likely or not self._allows(likely[0].token):
                ends_name = ([Guess(token, STRUCTURE)] for token in self.sample.tokens[-1:])
                candidates = chain(follow(guesses), ends_name)
                likely = next((guessed for guessed in candidates if self._allows(guessed[0].token)), [])
            if not likely:
                break
            (token, length), *likely = likely
            if not any(map(self._allows, self.sample.letter)):
                length = max(length, STRUCTURE)
            if not matcher.try_consume_tokens([token]):
                break
            guesses.append(Guess(token, length))
        matcher.rollback(len(guesses))
        return guesses

    def _allows(self, token: int) -> bool:
        """Whether it may come next."""
        allowed = bool(self._matcher.try_consume_tokens([token]))
        if allowed:
            self._matcher.rollback(1)
        return allowed

    @property
    def alive(self) -> bool:
        """Whether the grammar allows all tokens so far."""
        return not self._matcher.is_error()


class ThinkingMatcher(Matcher):
    """A reply that may think before it follows a grammar.

    It thinks if its likeliest first token begins thinking. Where it would end the turn within it, the thinking ends.

    Args:
        free: allows thinking, and after it what `strict` allows.
        strict: allows no thinking.
        ends: tokens that end a turn.
        begun: the beginning of the thinking that the prompt ends with, or nothing.
        sample: see `Matcher`.
    """

    def __init__(
        self,
        free: Matcher,
        strict: Matcher,
        thinking: Markers,
        tokenizer: Any,
        ends: Sequence[int],
        begun: str,
        sample: Sample,
    ) -> None:
        self.sample = sample
        self._free, self._alive, self._thinking = free, [free, strict], thinking
        self._ends, self._text = list(ends), ""
        self._stream = TokenTextStream(tokenizer.backend_tokenizer, special=True)
        self._closing: list[int] = tokenizer(thinking.closing, add_special_tokens=False)["input_ids"]
        self._forced: list[int] = []
        for token in tokenizer(begun, add_special_tokens=False)["input_ids"] if begun else ():
            self.accept(token)

    @property
    def _within(self) -> bool:
        """Whether the reply is thinking."""
        opened, closed = self._text.rfind(self._thinking.opening), self._text.rfind(self._thinking.closing)
        return self._free in self._alive and opened > closed and (closed < 0 or bool(self._thinking.skipped))

    def masked(self, logits: NDArray[numpy.float32]) -> NDArray[numpy.float32]:
        """Logits in which tokens that may not come next are -inf."""
        likeliest = int(logits.argmax())
        self._alive = [matcher for matcher in self._alive if matcher.alive]
        if not self._text and len(self._alive) > 1 and not self._free.allowed(len(logits))[likeliest]:
            self._alive.remove(self._free)
        if not self._forced and likeliest in self._ends and self._within:
            self._forced = list(self._closing)
        allowed = numpy.zeros(len(logits), bool)
        allowed[self._forced[:1]] = True
        for matcher in () if self._forced else self._alive:
            allowed |= matcher.allowed(len(logits))
        return _masked(logits, allowed, self._ends)

    def foresee(self, follow: Follow, max_guesses: int) -> list[Guess]:
        """See `Matcher`."""
        if self._forced:
            return [Guess(token, FORCED) for token in self._forced[:max_guesses]]
        if len(self._alive) > 1 or self._within:
            return next(iter(follow(())), [])[:max_guesses]
        return self._alive[0].foresee(follow, max_guesses)

    def accept(self, token: int) -> None:
        """Go on with a token."""
        self._forced = self._forced[1:]
        for matcher in self._alive:
            matcher.accept(token)
        self._text += self._stream.push(token)


def _masked(
    logits: NDArray[numpy.float32], allowed: NDArray[numpy.bool_], end_tokens: Sequence[int]
) -> NDArray[numpy.float32]:
    """Logits [V], in which only allowed tokens are left; only end tokens if the likeliest one is not allowed and the
    reply may end, and is not too short.
    """
    ends = list(end_tokens)
    ended = numpy.zeros_like(allowed)
    ended[ends] = allowed[ends] & (logits[ends] > BANNED)
    if ended.any() and not allowed[logits.argmax()]:
        allowed = ended
    return numpy.where(allowed, logits, numpy.float32(-numpy.inf))


def _as_lark(rules: str) -> str:
    """A text's grammar in the form of Lark; raises ValueError if it is no grammar."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(rules))
    except Exception as error:  # its parser raises whatever it meets
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


def added_texts(tokenizer: Any) -> dict[int, str]:
    """The texts of a tokenizer's added tokens, by id."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return {number: token.content for number, token in added.items()}


def compile_rules(
    tokenizer: Any, added: Mapping[int, str], rules: Mapping[str, Any] | str, thinking: Markers | None
) -> tuple[Any, Any]:
    """Llguidance's matchers, without thinking and after it; None if there is none. See `Grammar` and `added_texts`.

    Raises:
        DataError: see `Grammar`.
    """
    from llguidance import LLMatcher

    what = "grammar" if isinstance(rules, str) else "JSON schema"
    rules = rules if isinstance(rules, str) else {"x-guidance": _SPACE, **rules}
    try:
        lark = _as_lark(rules) if isinstance(rules, str) else ""
        grammar = LLMatcher.grammar_from_lark(lark) if lark else LLMatcher.grammar_from_json_schema(json.dumps(rules))
    except ValueError as error:
        raise DataError(f"the {what} is not supported: {error}") from error
    strict = LLMatcher(tokenizer, grammar, log_level=0)
    if strict.is_error():
        raise DataError(f"the {what} is not supported: {strict.get_error().splitlines()[0]}")
    if thinking is None:
        return strict, None
    special = {text: number for number, text in added.items() if tokenizer.is_special_token(number)}
    content = {"json_schema": rules} if isinstance(rules, Mapping) else {"lark_grammar": lark}
    return strict, LLMatcher(tokenizer, _after_thinking(content, thinking, special), log_level=0)


@lru_cache(maxsize=2)
def guided(serialized: str, vocabulary: int, end_tokens: tuple[int, ...]) -> Any:
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


def _after_thinking(content: Mapping[str, Any], thinking: Markers, special: Mapping[str, int]) -> str:
    """A grammar of llguidance in which thinking comes before what another one describes; as a channel, several times.

    Thinking is any text without special tokens, up to the text or the token that ends it.
    """
    write = partial(literal, special=special)
    first, *others = _parts(thinking.closing, special)
    text, rest = ("", thinking.closing) if first in special else (first, "".join(others))
    until = re.escape(text).replace("/", r"\/")
    ending = f"(GAP? {write(thinking.ending)})?" if thinking.ending else ""
    begins = " | ".join(("thought GAP?", *(f"{write(skipped)} GAP?" for skipped in thinking.skipped)))
    rules = [
        "%llguidance {}",
        f"start: before{'+' if thinking.skipped else ''} @content {ending}",
        f"before: {begins}",
        f"thought: {write(thinking.opening)} free {write(rest)}",
        f"free{'[lazy]' if text else ''}: /(.|\\n)*{until}/",
        "GAP: /\\s{1,8}/",
    ]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, {**content, "name": "content"}]})
