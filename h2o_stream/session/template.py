"""The new tokens of each turn, from any chat template.

A template formats whole conversations, and may format past turns differently each time. So its output for a growing
conversation cannot be fed incrementally. Instead it is rendered twice with placeholders: once for the start of a
conversation, and once for the text between two replies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError

from h2o_stream.config import THINKING_VARIABLES
from h2o_stream.errors import H2OStreamError, UnsupportedModelError
from h2o_stream.session.thinking import Markers, find_markers

_SYSTEM = "3a9d-the-system-prompt-says-this-60be"
_USER = "7c9e-the-user-says-this-2f41"
_FIRST_USER = "5d1b-the-user-said-this-8a03"
_REPLY = "e604-the-assistant-said-this-b97c"


@dataclass(frozen=True)
class Prompt:
    """The new tokens of a turn.

    Attributes:
        tokens: to feed.
        num_pinned: how many of them, from the start, must never be evicted.
        recalled: which of them repeat passages of earlier turns.
        num_thinking: how many of them, at the end, begin the thinking of the reply; None if it is not begun.
    """

    tokens: list[int]
    num_pinned: int = 0
    recalled: range = range(0)
    num_thinking: int | None = None


def encodable(text: str) -> str:
    """The text with a question mark for each unpaired surrogate, which tokenizers reject."""
    return text.encode("utf-8", "replace").decode()


def inserted(without: Sequence[int], tokens: Sequence[int]) -> range:
    """Where `tokens` has something that `without` has not: all but the start and the end that they share."""
    start = _shared(without, tokens)
    return range(start, len(tokens) - _shared(without[start:][::-1], tokens[start:][::-1]))


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


class ChatTemplate:
    """Formats the turns of a conversation as token ids.

    Args:
        tokenizer: with a chat template.
        system: the system prompt; None leaves it to the template.
        end_tokens: the model's end-of-turn tokens.
        thinking: whether the model is to think, for templates with a switch for it; None leaves it to the template.
    """

    def __init__(
        self, tokenizer: Any, system: str | None, end_tokens: Collection[int], thinking: bool | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._system = system
        self._end_tokens = end_tokens
        self._added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        self._special = tuple(token.content for token in self._added.values())
        self._system_text = (system or "").strip()
        self._variables = dict[str, bool]()
        if thinking is not None and self.thinking_switch:
            self._variables = {self.thinking_switch: thinking}

    def first_turn(self, user: str) -> Prompt:
        """The first turn. Everything before the user's message is pinned, including the system prompt."""
        before, after = self._opening
        tokens, fixed = self._encode(before, user, after), self._tokens(before)
        return Prompt(tokens, _shared(tokens, fixed), num_thinking=self._num_thinking(tokens, after))

    def next_turn(self, user: str, ended: bool) -> Prompt:
        """Any later turn.

        Args:
            user: the user's message.
            ended: whether the previous reply ended with an end-of-turn token, which is then in the cache. Otherwise
                the template's own is fed first.
        """
        before, after = self._following
        tokens = self._encode(before, user, after)
        if ended:
            end = next((i for i, token in enumerate(self._tokens(before)) if token in self._end_tokens), -1)
            tokens = tokens[end + 1 :]
        return Prompt(tokens, num_thinking=self._num_thinking(tokens, after))

    def reply(self, text: str, thinking: bool = False) -> list[int]:
        """A past reply, with the token that ends it if the template has one.

        Args:
            text: of the answer.
            thinking: whether the prompt has begun the thinking, which is then ended at once.
        """
        ends = [token for token in self._tokens(self._following[0]) if token in self._end_tokens]
        closing = self._tokens(f"\n{self.markers.closing}\n\n") if thinking and self.markers else []
        return [*closing, *self._tokens(text, as_text=True), *ends[:1]]

    @cached_property
    def markers(self) -> Markers | None:
        """How the model marks its thinking; None if it is not known to think."""
        return find_markers(self._tokenizer.get_chat_template(), self._special, self._opening[1])

    @cached_property
    def marker_tokens(self) -> dict[int, str]:
        """The control tokens of these markers, which are otherwise not part of a reply's text, by id."""
        texts = self.markers.all if self.markers else ()
        return {
            number: token.content
            for number, token in self._added.items()
            if token.special and any(token.content in text for text in texts)
        }

    @cached_property
    def thinking_switch(self) -> str | None:
        """The variable of the template that switches thinking on and off; None if it has none."""
        messages = [_message("user", _USER)]
        for name in THINKING_VARIABLES:
            if self._render(messages, {name: True}) != self._render(messages, {name: False}):
                return name
        return None

    def require_thinking_switch(self) -> None:
        """Check that thinking can be switched on and off.

        Raises:
            H2OStreamError: it cannot.
        """
        if self.thinking_switch is None:
            raise H2OStreamError(
                f"the model's chat template has no switch for thinking ({', '.join(THINKING_VARIABLES)})"
            )

    def _num_thinking(self, tokens: Sequence[int], after: str) -> int | None:
        """See `Prompt`, for a prompt that ends with the text `after`."""
        opening = self.markers.unclosed(after) if self.markers else ""
        if not opening:
            return None
        begun = self._tokens(opening)
        return len(begun) if list(tokens[-len(begun) :]) == begun else 0

    @cached_property
    def _opening(self) -> tuple[str, str]:
        """The text before and after the first message. A system prompt with control tokens becomes `_SYSTEM`."""
        system = self._system
        if system is None:
            return self._split(self._render([_message("user", _USER)]))
        if self._has_markers(system):
            system = system.replace(self._system_text, _SYSTEM, 1)
        messages = [_message("system", system), _message("user", _USER)]
        if not self._has_system_role:
            messages = [_message("user", f"{system}\n\n{_USER}")]
        return self._split(self._render(messages))

    @property
    def _has_system_role(self) -> bool:
        """Whether the template includes system prompts, rather than rejecting or omitting them."""
        try:
            return _SYSTEM in self._render([_message("system", _SYSTEM), _message("user", _USER)])
        except UnsupportedModelError:
            return False

    @cached_property
    def _following(self) -> tuple[str, str]:
        """The text before and after any later message."""
        messages = [_message("user", _FIRST_USER), _message("assistant", _REPLY), _message("user", _USER)]
        _, found, tail = self._render(messages).rpartition(_REPLY)
        if not found:
            raise UnsupportedModelError("the chat template omits past replies; use a model with another template")
        return self._split(tail)

    def _render(self, messages: list[dict[str, str]], variables: Mapping[str, bool] | None = None) -> str:
        options = {"tokenize": False, "add_generation_prompt": True, **(variables or self._variables)}
        try:
            return str(self._tokenizer.apply_chat_template(messages, **options))
        except TemplateError as error:
            message = f"the chat template fails: {error}; use a model with another template"
            raise UnsupportedModelError(message) from error

    def _split(self, rendered: str) -> tuple[str, str]:
        before, found, after = rendered.partition(_USER)
        if not found:
            raise UnsupportedModelError("the chat template omits the user's message; use a model with another template")
        return before, after

    def _encode(self, before: str, user: str, after: str) -> list[int]:
        """Tokens of a turn. Nothing in the user's message becomes a control token."""
        if self._has_markers(user):
            return [*self._tokens(before), *self._tokens(user, as_text=True), *self._tokens(after)]
        return self._tokens(before + user + after)

    def _has_markers(self, text: str) -> bool:
        """Whether a text contains control tokens or our placeholders."""
        return any(marker in text for marker in (*self._special, _SYSTEM, _USER))

    def _tokens(self, text: str, as_text: bool = False) -> list[int]:
        """Tokens of rendered text, with the system prompt as plain text; or of a text that is plain throughout."""
        first, *rest = [text] if as_text else text.split(_SYSTEM)
        tokens = self._tokenize(first, as_text)
        for piece in rest:
            tokens += [*self._tokenize(self._system_text, as_text=True), *self._tokenize(piece, as_text)]
        return tokens

    def _tokenize(self, text: str, as_text: bool) -> list[int]:
        pieces = self.markers.cut(text) if as_text and self.markers else [text]
        options = {"add_special_tokens": False, "split_special_tokens": as_text}
        return [token for piece in pieces for token in self._tokenizer(piece, **options)["input_ids"]]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
