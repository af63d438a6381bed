"""Tokens of rendered chat templates, in which no text of users becomes a control token."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import AddedToken, Tokenizer

from h2o_stream.base.token_texts import tokenizer_errors
from h2o_stream.errors import DataError
from h2o_stream.models.tokenizer import encode

_SECRET = secrets.token_hex(8)
"""Part of the control tokens' other names, so that no text has them."""


_NO_WORD = re.compile(r"\W")

_PIECE = 2**16
"""Characters of a text that are searched at once."""


class ControlTokens:
    """Marks control tokens in the texts of users, and encodes what a template makes of these texts.

    An added token is a control token whether flagged special or not, unless it is white space only: templates frame
    turns with tokens that can be distinguished from text, and files flag them unreliably.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        self._tokens = {number: token for number, token in added.items() if token.content.strip()}
        self._nonce = secrets.token_hex(8)
        self._open, self._close = f"open{self._nonce}", f"close{self._nonce}"
        contents = sorted((token.content for token in self._tokens.values()), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, contents)) or r"(?!)")
        self._longest = max(map(len, contents), default=0)
        self._parts = _parts(tuple(contents))

    def found(self, value: Any) -> str | None:
        """The first control token in the texts of a JSON value, keys included."""
        return next((match.group() for text in _texts(value) for match in self._matches(text)), None)

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        """The control tokens in a text, which is searched in pieces: no other thread goes on meanwhile."""
        place = 0
        while place < len(text):
            stop = place + _PIECE
            match = self._pattern.search(text, place, stop + self._longest)
            if match is None or match.start() >= stop:
                place = stop
                continue
            yield match
            place = match.end()

    def _replaced(self, text: str, change: Callable[[str], str]) -> str:
        """A text with its control tokens changed."""
        parts, place = list[str](), 0
        for match in self._matches(text):
            parts += (text[place : match.start()], change(match.group()))
            place = match.end()
        return "".join((*parts, text[place:])) if parts else text

    def _split(self, rendered: str) -> list[str]:
        """A rendered text, and what is marked in it, in turn."""
        parts, place = list[str](), 0
        while (start := rendered.find(self._open, place)) >= 0 and (stop := rendered.find(self._close, start)) >= 0:
            start = rendered.rfind(self._open, start, stop)
            parts += (rendered[place:start], rendered[start + len(self._open) : stop])
            place = stop + len(self._close)
        return [*parts, rendered[place:]]

    def guard(self, text: str, kept: Collection[str] = ()) -> str:
        """The user's text with its control tokens marked, but for those kept, and what would be one with the text of a
        template before or after it. Templates see the same text but for these marks.
        """
        marked = self._replaced(text, lambda token: token if token in kept else self._marked(token))
        starts, ends = self._parts
        core = marked.strip()
        size = max((size for size in range(1, min(starts.size, len(core)) + 1) if core[-size:] in starts), default=0)
        head = max((size for size in range(1, min(ends.size, len(core)) + 1) if core[:size] in ends), default=0)
        if not size and not head:
            return marked
        rest = max(len(core) - size, head)
        core = f"{self._marked(core[:head])}{core[head:rest]}{self._marked(core[rest:])}"
        return f"{marked[: len(marked) - len(marked.lstrip())]}{core}{marked[len(marked.rstrip()) :]}"

    def guard_all(self, value: Any) -> Any:
        """A JSON value with its texts guarded."""
        if isinstance(value, str):
            return self.guard(value)
        if isinstance(value, Mapping):
            return {self.guard_all(key): self.guard_all(item) for key, item in value.items()}
        return [self.guard_all(item) for item in value] if isinstance(value, list | tuple) else value

    def _marked(self, text: str) -> str:
        return text and f"{self._open}{text}{self._close}"

    def unguard(self, text: str) -> str:
        """A rendered text without marks."""
        return text.replace(self._open, "").replace(self._close, "") if self._nonce in text else text

    def encode(self, rendered: str) -> list[int]:
        """Tokens of a rendered text: the tokenizer's own, except that what `guard` has marked is plain text.

        Raises:
            DataError: the tokenizer makes control tokens of plain text.
        """
        parts = [self.unguard(part) for part in self._split(rendered)]
        num_controls = sum(1 for part in parts[::2] for _ in self._matches(part))
        if len(parts) == 1:
            tokens: list[int] = self._tokenizer(parts[0], add_special_tokens=False)["input_ids"]
            if self._count(tokens) <= num_controls:
                return tokens
        parts[::2] = [self._replaced(part, _alias) for part in parts[::2]]
        return self._encode_aliased("".join(parts), num_controls)

    def _encode_aliased(self, text: str, num_controls: int) -> list[int]:
        tokenizer, ids, unknown = self._aliased
        tokens = [ids.get(token, token) for token in encode(tokenizer, text)]
        if self._count([token for token in tokens if token != unknown]) > num_controls:
            raise DataError("the tokenizer makes control tokens of this text; accepted: a text without their names")
        return tokens

    def _count(self, tokens: list[int]) -> int:
        return sum(token in self._tokens for token in tokens)

    @property
    def _aliased(self) -> _Aliased:
        return aliased(self._tokenizer)


class _Parts(frozenset[str]):
    """Texts, and the length of the longest one."""

    @cached_property
    def size(self) -> int:
        return max(map(len, self), default=0)


@lru_cache(maxsize=4)
def _parts(contents: tuple[str, ...]) -> tuple[_Parts, _Parts]:
    """The texts with which control tokens begin, and end, without whole ones and parts of words."""
    places = [(text, place) for text in contents for place in range(1, len(text))]
    starts, ends = (text[:place] for text, place in places), (text[place:] for text, place in places)
    return _Parts(filter(_NO_WORD.search, starts)), _Parts(filter(_NO_WORD.search, ends))


def _alias(content: str) -> str:
    return f"\ue000{_SECRET}{content}\ue001"


_Aliased = tuple[Tokenizer, Mapping[int, int], int | None]
"""A tokenizer with secret names for control tokens, own ids of added tokens by its ids, and the id of unknown text."""

_made: WeakKeyDictionary[Any, tuple[dict[int, str], _Aliased]] = WeakKeyDictionary()


def aliased(tokenizer: Any) -> _Aliased:
    """The same tokenizer with secret names. It is made once, which takes a quarter of a second for 49,152 entries."""
    added = {number: token.content for number, token in tokenizer.backend_tokenizer.get_added_tokens_decoder().items()}
    known = _made.get(tokenizer)
    if known is None or known[0] != added:
        known = _made[tokenizer] = added, _with_secret_names(tokenizer.backend_tokenizer.to_str())
    return known[1]


@lru_cache(maxsize=2)
def _with_secret_names(serialized: str) -> _Aliased:
    described = json.loads(serialized)
    tokens = [token for token in described["added_tokens"] if token["content"].strip()]
    names = {token["content"]: _alias(token["content"]) for token in tokens}
    aliases = {token["id"]: names.get(token["content"], token["content"]) for token in described["added_tokens"]}
    described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] not in names]
    described.update(post_processor=None, truncation=None, padding=None)
    _rename(described["model"], names)
    with tokenizer_errors("control tokens cannot be distinguished from text with this tokenizer", DataError):
        tokenizer = Tokenizer.from_str(json.dumps(described))
    for token in tokens:
        flags = {name: token[name] for name in ("single_word", "lstrip", "rstrip")}
        tokenizer.add_tokens([AddedToken(names[token["content"]], normalized=False, special=False, **flags)])
    ids = {tokenizer.token_to_id(alias): number for number, alias in aliases.items()}
    model = described["model"]
    unknown = tokenizer.token_to_id(model.get("unk_token") or "") if "unk_id" not in model else model["unk_id"]
    return tokenizer, {alias: number for alias, number in ids.items() if alias is not None}, unknown


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Give entries of a model's vocabulary other names, so that no text is encoded as them."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): number for piece, number in vocab.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
