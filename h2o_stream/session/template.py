"""The new tokens of each turn, from any chat template."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from h2o_stream.engine.text import Markers, shared_length
from h2o_stream.errors import DataError, H2OStreamError
from h2o_stream.models.turn_tokens import with_bos
from h2o_stream.recall.answer_head import Place, Text
from h2o_stream.session.calls import find_format
from h2o_stream.session.messages import Tool, UserTurn
from h2o_stream.session.thinking import find_markers
from h2o_stream.session.turn_texts import TurnTexts


@dataclass(frozen=True)
class Prompt:
    """The new tokens of a turn.

    Attributes:
        num_pinned: how many of them, from the start, must never be evicted.
        recalled: the range of `tokens` that repeats passages of earlier turns.
        num_thinking: how many of them, at the end, begin the thinking of the reply; None if it is not begun.
    """

    tokens: list[int]
    num_pinned: int = 0
    recalled: range = range(0)
    num_thinking: int | None = None


def inserted(without: Sequence[int], tokens: Sequence[int]) -> range:
    """Where `tokens` has something that `without` has not: all but the start and the end that they share."""
    start = shared_length(without, tokens)
    return range(start, len(tokens) - shared_length(without[start:][::-1], tokens[start:][::-1]))


class ChatTemplate(TurnTexts):
    """Formats the turns of a conversation as token ids.

    With None, the system prompt, or whether the model is to think, is left to the template; only templates with a
    switch for thinking follow it. `effort` is how much it is to think, for templates that say so. The first turn
    describes the tools, which are JSON schemas.
    """

    def __init__(
        self,
        tokenizer: Any,
        system: str | None,
        end_tokens: Collection[int],
        thinking: bool | None = None,
        tools: Sequence[Tool] = (),
        effort: str | None = None,
    ) -> None:
        super().__init__(tokenizer, system, thinking, tools, effort)
        self._end_tokens = end_tokens
        self._added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        self._special = tuple(token.content for token in self._added.values())

    def first_turn(self, user: UserTurn) -> Prompt:
        """The first turn. Everything before the user's message is pinned, including system prompt and tools.

        Raises:
            DataError: see `next_turn`; or messages begin with the result of a tool.
            UnsupportedModelError: see `next_turn`; or the template omits the tools.
        """
        after = self._opening[1]
        if not isinstance(user, str) and user[0]["role"] == "tool":
            raise DataError(f"the first message has the role {user[0]['role']}; a conversation begins with user")
        tokens, after = self._compose(user, self._render_first, after)
        tokens = with_bos(self._tokenizer, tokens)
        pinned = shared_length(tokens, self._opening_tokens)
        return Prompt(tokens, pinned, num_thinking=self._num_thinking(tokens, after))

    def next_turn(self, user: UserTurn, ended: bool) -> Prompt:
        """Any later turn. If the previous reply ended with an end-of-turn token, that is in the cache; otherwise the
        template's own is fed first.

        Raises:
            DataError: a tool call has control tokens.
            UnsupportedModelError: the template rejects the messages, or omits tool calls or results.
        """
        before, after = self._following
        tokens, after = self._compose(user, self._render_next, after)
        if ended:
            start = tokens[: shared_length(tokens, self._controls.encode(before))]
            tokens = tokens[next((i for i, token in enumerate(start, 1) if token in self._end_tokens), 0) :]
        return Prompt(tokens, num_thinking=self._num_thinking(tokens, after))

    def reply(self, text: str, thinking: bool = False, own: bool = False) -> list[int]:
        """A past reply, with the token that ends it if the template has one. If the prompt has begun thinking, that is
        ended first. In the model's own words, what marks calls of tools are control tokens.
        """
        ends = [token for token in self._controls.encode(self._following[0]) if token in self._end_tokens]
        return [*self._begun(text, thinking, self._call_markers if own else ()), *ends[:1]]

    def begin(self, prompt: Prompt, text: str) -> Prompt:
        """The prompt with the start of its reply. If it has begun thinking, that is ended first."""
        tokens = self._begun(text, prompt.num_thinking is not None)
        return replace(prompt, tokens=[*prompt.tokens, *tokens], num_thinking=None)

    def _begun(self, text: str, thinking: bool, kept: Collection[str] = ()) -> list[int]:
        return [*(self.thinking_end() if thinking else ()), *self._controls.encode(self._controls.guard(text, kept))]

    def thinking_end(self, message: str = "") -> list[int]:
        """The tokens that end thinking where it would go on."""
        return self._controls.encode(self.markers.ended(self._controls.guard(message))) if self.markers else []

    @cached_property
    def markers(self) -> Markers | None:
        """How the model marks its thinking; None if it is not known to think."""
        return find_markers(self._tokenizer.get_chat_template(), self._special, self._opening[1])

    @property
    def free_thinking(self) -> Markers | None:
        """How thinking is marked that may come before an answer that follows rules; None if it is switched off."""
        begun = self.markers is not None and self.markers.unclosed(self._opening[1])
        return None if self._thinking is False and self.thinking_switch and not begun else self.markers

    @cached_property
    def _call_markers(self) -> Collection[str]:
        """The control tokens that mark calls of tools."""
        calls = find_format(self._tokenizer) if self._tools else None
        return {token for token in self._special if calls and any(token in text for text in calls.markers)}

    @cached_property
    def marker_tokens(self) -> dict[int, str]:
        """The control tokens that mark thinking and calls of tools, by id. No others are part of a reply's text."""
        texts = self.markers.all if self.markers else ()
        if self._tools and (calls := find_format(self._tokenizer)):
            texts = (*texts, *calls.markers)
        return {
            number: token.content
            for number, token in self._added.items()
            if token.special and any(token.content in text for text in texts)
        }

    def _num_thinking(self, tokens: Sequence[int], after: str) -> int | None:
        """How many of the last tokens begin thinking, in a prompt that ends with the text `after`."""
        opening = self.markers.unclosed(after) if self.markers else ""
        if not opening:
            return None
        begun = self._controls.encode(opening)
        return len(begun) if list(tokens[-len(begun) :]) == begun else 0

    @property
    def opening_size(self) -> int:
        """How many tokens come before the first message."""
        return len(self._opening_tokens)

    @cached_property
    def _opening_tokens(self) -> list[int]:
        """Tokens of the text before the first message."""
        return with_bos(self._tokenizer, self._controls.encode(self._opening[0]))


def place_alone(template: ChatTemplate) -> Place | None:
    """Where a text is that is read as the first message of a conversation; None if that cannot be seen."""
    try:
        one, other = (template.first_turn(text).tokens for text in ("Yes.", "no!"))
    except H2OStreamError:
        return None
    start, after = shared_length(one, other), shared_length(one[::-1], other[::-1])

    def place(text: str) -> Text:
        tokens = template.first_turn(text).tokens
        return Text(tokens, start, len(tokens) - after)

    return place
