"""Only the new tokens of each turn, from any chat template.

A template writes whole conversations and may write the past differently each time, so its output for a
growing history cannot be fed as it grows. Instead it is asked once how a conversation opens and once what it
puts between one reply and the next, with placeholders for the words.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError

from h2o_stream.errors import UnsupportedModelError

_SYSTEM = "3a9d-the-system-prompt-says-this-60be"
_USER = "7c9e-the-user-says-this-2f41"
_FIRST = "5d1b-the-user-said-this-8a03"
_REPLY = "e604-the-assistant-said-this-b97c"


@dataclass(frozen=True)
class Prompt:
    """New tokens of a turn.

    Attributes:
        tokens: to feed.
        pinned: how many of them, from the start, are never to be evicted.
    """

    tokens: list[int]
    pinned: int = 0


class ChatTemplate:
    """How a model's chats are written.

    Args:
        tokenizer: with a chat template.
        system: the system prompt; None leaves it to the template.
        end_tokens: the model's end-of-turn tokens.
    """

    def __init__(self, tokenizer: Any, system: str | None, end_tokens: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._system = system
        self._ends = end_tokens
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        self._special = tuple(token.content for token in added)
        self._words = (system or "").strip()

    def opening(self, user: str) -> Prompt:
        """The first turn: all that comes before the user's words is pinned, the system prompt with it."""
        before, after = self._opening
        tokens, fixed = self._encode(before, user, after), self._tokens(before)
        pinned = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(tokens, fixed, strict=False))))
        return Prompt(tokens, pinned)

    def following(self, user: str, ended: bool) -> Prompt:
        """Any later turn.

        Args:
            user: what the user says.
            ended: whether the reply before it ended with an end-of-turn token, which is in the cache then;
                otherwise the template's own is fed now.
        """
        before, after = self._following
        tokens = self._encode(before, user, after)
        if ended:
            end = next((i for i, token in enumerate(self._tokens(before)) if token in self._ends), -1)
            tokens = tokens[end + 1 :]
        return Prompt(tokens)

    def reply(self, text: str) -> list[int]:
        """A reply that was given, and the token that ends it, if the template has one."""
        ends = [token for token in self._tokens(self._following[0]) if token in self._ends]
        return [*self._tokens(text, plain=True), *ends[:1]]

    @cached_property
    def _opening(self) -> tuple[str, str]:
        """Before and after the user's first words; a system prompt that has marks is `_SYSTEM` here."""
        system = self._system
        if system is None:
            return self._split(self._render([_said("user", _USER)]))
        if self._has_marks(system):
            system = system.replace(self._words, _SYSTEM, 1)
        messages = [_said("system", system), _said("user", _USER)]
        if not self._has_system_role:
            messages = [_said("user", f"{system}\n\n{_USER}")]
        return self._split(self._render(messages))

    @property
    def _has_system_role(self) -> bool:
        """Whether the template writes system prompts, rather than refuse them or leave them out."""
        try:
            return _SYSTEM in self._render([_said("system", _SYSTEM), _said("user", _USER)])
        except UnsupportedModelError:
            return False

    @cached_property
    def _following(self) -> tuple[str, str]:
        written = self._render([_said("user", _FIRST), _said("assistant", _REPLY), _said("user", _USER)])
        _, found, tail = written.rpartition(_REPLY)
        if not found:
            raise UnsupportedModelError("the chat template leaves past replies out; use a model with another one")
        return self._split(tail)

    def _render(self, messages: list[dict[str, str]]) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            raise UnsupportedModelError(f"the chat template fails: {error}; use a model with another one") from error

    def _split(self, written: str) -> tuple[str, str]:
        before, found, after = written.partition(_USER)
        if not found:
            raise UnsupportedModelError("the chat template leaves the user's words out; use a model with another one")
        return before, after

    def _encode(self, before: str, user: str, after: str) -> list[int]:
        """Tokens of a turn. What a user types never becomes a control token of the template."""
        if self._has_marks(user):
            return [*self._tokens(before), *self._tokens(user, plain=True), *self._tokens(after)]
        return self._tokens(before + user + after)

    def _has_marks(self, text: str) -> bool:
        """Whether a text would be mistaken for what a template writes, or for a placeholder."""
        return any(mark in text for mark in (*self._special, _SYSTEM, _USER))

    def _tokens(self, text: str, plain: bool = False) -> list[int]:
        """Tokens of what a template wrote, the system prompt's words as text; or of nothing but text."""
        first, *rest = [text] if plain else text.split(_SYSTEM)
        tokens = self._encoded(first, plain)
        for piece in rest:
            tokens += [*self._encoded(self._words, plain=True), *self._encoded(piece, plain)]
        return tokens

    def _encoded(self, text: str, plain: bool) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=plain)
        return list(encoded["input_ids"])


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
