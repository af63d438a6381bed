"""The texts of turns, by any chat template: rendered with placeholders, and what is checked of them.

A template formats whole conversations, and may format past turns differently each time. So its output for a growing
conversation cannot be fed incrementally. Instead it is rendered twice with placeholders: once for the start of a
conversation, and once for the text between two replies.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias

from jinja2 import TemplateError

from h2o_stream.config import EFFORT_VARIABLE, THINKING_VARIABLES, THINKING_WORDS
from h2o_stream.errors import DataError, UnsupportedModelError
from h2o_stream.models.rendering import apply_template
from h2o_stream.session.control_tokens import ControlTokens
from h2o_stream.session.messages import Message, Tool, UserTurn, as_users, with_placeholders

_SYSTEM = "3a9d-the-system-prompt-says-this-60be"
_USER = "7c9e-the-user-says-this-2f41"
_FIRST_USER = "5d1b-the-user-said-this-8a03"
_REPLY = "e604-the-assistant-said-this-b97c"
_GREETING = "Hello."
"""What the user says before a greeting of the assistant, for templates that begin with the user."""

_CALL = "b2f7-this-tool-is-called-40d9"

Render: TypeAlias = Callable[[Sequence[Message], str | None], str]
"""The text of messages with this system prompt."""


class TurnTexts:
    """What a chat template makes of the turns of a conversation; arguments as for `ChatTemplate`."""

    def __init__(
        self, tokenizer: Any, system: str | None, thinking: bool | None, tools: Sequence[Tool], effort: str | None
    ) -> None:
        self._tokenizer, self._system, self._thinking = tokenizer, system, thinking
        self._controls = ControlTokens(tokenizer)
        self._tools: list[Tool] = self._controls.guard_all(tools)
        self._nonce = secrets.token_hex(8)
        self._variables, self._word = dict[str, bool | int | str](), ""
        switch = "" if thinking is None else self.thinking_switch or ""
        if switch in THINKING_VARIABLES:
            on, off = THINKING_VARIABLES[switch]
            self._variables = {switch: on if thinking else off}
        elif switch:
            self._word = next(on for on, off in THINKING_WORDS if off == switch) if thinking else switch
        if effort is not None:
            self._variables[EFFORT_VARIABLE] = effort

    @cached_property
    def thinking_switch(self) -> str | None:
        """The variable of the template that switches thinking on and off, or the word in messages that switches it off;
        None if it has none.
        """
        messages = [_message("user", _USER)]
        for name, (on, off) in THINKING_VARIABLES.items():
            if self._render(messages, variables={name: on}) != self._render(messages, variables={name: off}):
                return name
        for words in THINKING_WORDS:
            if words[1] in self._tokenizer.get_chat_template():
                on_text, off_text = (self._render(_with_word(messages, word)).replace(word, "") for word in words)
                if on_text != off_text:
                    return words[1]
        return None

    @cached_property
    def _opening(self) -> tuple[str, str]:
        """The text before and after the first message, with control tokens of the system prompt marked."""
        messages = [_message("user", self._placeholder(_USER))]
        rendered = self._render_turn(messages, self._render_first)
        if self._tools:
            self._refuse_markers(self._tools, "tools")
            if rendered == self._render_turn(messages, partial(self._render_first, with_tools=False)):
                raise UnsupportedModelError(
                    "the chat template omits tools; leave them out, or use a model that has them"
                )
        return self._split(rendered)

    def _render_first(self, messages: Sequence[Message], system: str | None, with_tools: bool = True) -> str:
        """The start of a conversation, with the system prompt."""
        tools = self._tools if with_tools else []
        if system is None:
            return self._render(messages, tools)
        if self._has_system_role:
            return self._render([_message("system", system), *messages], tools)
        first, *others = messages
        if first["role"] != "user":
            raise UnsupportedModelError("the chat template has no system prompts, which need a message of the user")
        return self._render([{**first, "content": f"{system}\n\n{first['content']}"}, *others], tools)

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
        return self._split(self._render_next([_message("user", self._placeholder(_USER))]))

    def _render_next(self, messages: Sequence[Message], system: str | None = None) -> str:
        """The text between two replies. System prompt and tools are in the cache since the first turn."""
        reply = self._placeholder(_REPLY)
        past = [_message("user", self._placeholder(_FIRST_USER)), _message("assistant", reply)]
        _, separator, tail = self._render([*past, *messages]).rpartition(reply)
        if not separator:
            raise UnsupportedModelError("the chat template omits past replies; use a model with another template")
        return tail

    def _placeholder(self, text: str) -> str:
        """A text that no message has."""
        return f"{text}-{self._nonce}"

    def _render_turn(self, messages: Sequence[Message], render: Render) -> str:
        """What the template makes of these very messages, with their control tokens marked."""
        guarded = [{**self._controls.guard_all(message), "role": message["role"]} for message in messages]
        system = self._system and self._controls.guard(self._system)
        marked = render(guarded, system)
        changed = system != self._system or guarded != list(messages)
        if changed and self._controls.unguard(marked) != self._controls.unguard(render(messages, self._system)):
            control = self._controls.found([self._system or "", *messages])
            what = f"the control token {control}" if control else "a part of a control token at their edge"
            raise DataError(f"the chat template changes texts with {what}; accepted: other texts")
        return marked

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        variables: Mapping[str, bool | int | str] | None = None,
    ) -> str:
        options = {"add_generation_prompt": True, **(variables or self._variables)}
        try:
            messages = _with_word(messages, self._word)
            return apply_template(self._tokenizer, messages, list(tools) or None, **options)
        except (TemplateError, TypeError) as error:
            message = f"the chat template fails: {' '.join(str(error).split())}; use a model with another template"
            raise UnsupportedModelError(message) from error

    def _split(self, rendered: str) -> tuple[str, str]:
        before, placeholder, after = rendered.partition(self._placeholder(_USER))
        if not placeholder:
            raise UnsupportedModelError("the chat template omits the user's message; use a model with another template")
        return before, after

    def _compose(self, user: UserTurn, render: Render, after: str) -> tuple[list[int], str]:
        """Tokens of a turn, in which no content becomes a control token, and the text after the last content."""
        messages = [_message("user", user)] if isinstance(user, str) else self._fitted(user, render)
        if not isinstance(user, str):
            others = [{name: message[name] for name in message.keys() - {"role", "content"}} for message in messages]
            self._refuse_markers(others, "tool_calls")
            self._check_rendered(messages, render)
        rendered = self._render_turn(messages, render)
        text = self._controls.unguard(rendered)
        ending = after if text.endswith(after) else text.rpartition(messages[-1]["content"].strip())[2]
        return self._controls.encode(rendered), ending

    def _fitted(self, messages: Sequence[Message], render: Render) -> list[Message]:
        """The messages, in a form that the template renders. It may reject or omit system messages in the middle of a
        conversation, which become the user's, and greetings, before which the user then says something.
        """
        opened, greeted = [_message("user", _GREETING), *messages], messages[0]["role"] == "assistant"
        if not greeted and all(message["role"] != "system" for message in messages):
            return list(messages)
        forms = [list(messages), as_users(messages), *([opened, as_users(opened)] if greeted else [])]
        return next((candidate for candidate in forms if self._has_room(candidate, render)), forms[-1])

    def _has_room(self, messages: Sequence[Message], render: Render) -> bool:
        hidden, texts = with_placeholders(messages, lambda _: True)
        try:
            rendered = render(hidden, self._system)
        except UnsupportedModelError:
            return False
        places = [rendered.find(text) for text in texts]
        return -1 not in places and places == sorted(places)

    def _check_rendered(self, messages: Sequence[Message], render: Render) -> None:
        """Check that the template omits neither a tool call nor a result."""
        hidden, results = with_placeholders(messages, lambda message: message["role"] == "tool")
        calls = sum(len(message.get("tool_calls", ())) for message in messages)
        rendered = render([_with_marked_calls(message) for message in hidden], self._system)
        if rendered.count(_CALL) < calls or not all(result in rendered for result in results):
            what = "results of tools" if rendered.count(_CALL) >= calls else "tool calls"
            raise UnsupportedModelError(f"the chat template omits {what}; use a model with another template")

    def _refuse_markers(self, value: Sequence[Any], name: str) -> None:
        """Check that nothing in a JSON value would become a control token."""
        if marker := self._controls.found(value):
            raise DataError(f"{name} have the control token {marker}; accepted: any other text")


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _with_word(messages: Sequence[Message], word: str) -> list[Message]:
    """The messages, the user's last one with a word at its end."""
    last = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=-1)
    return [
        {**message, "content": f"{message['content']} {word}"} if word and place == last else message
        for place, message in enumerate(messages)
    ]


def _with_marked_calls(message: Message) -> Message:
    """The message with `_CALL` as the name of every tool that it calls."""
    if "tool_calls" not in message:
        return message
    calls = [{**call, "function": {**call["function"], "name": _CALL}} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}
