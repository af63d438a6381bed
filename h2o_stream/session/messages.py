"""Messages that are more than a user's text: calls of tools and their results, in the form of chat templates.

Here they are checked, and what is shown of them is decided. Nothing calls a tool.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from h2o_stream.base.json_text import check_depth
from h2o_stream.base.resources import replace_surrogates
from h2o_stream.errors import DataError

Message = Mapping[str, Any]
"""``role`` is ``user``, ``system``, ``assistant`` or ``tool``, ``content`` is text. An assistant's message may have
``tool_calls``; other fields are passed to the template."""

Tool = Mapping[str, Any]
"""The description of a tool, a JSON schema."""

UserTurn = str | Sequence[Message]
"""What comes between two replies of the model: the user's text, or messages."""

_ROLES = ("user", "system", "assistant", "tool")
_PLACEHOLDER = "91c4-a-text-of-this-message-5be0-{}-d7"


def encodable_json(value: Any) -> Any:
    """A copy of a JSON value with the replacement character for each unpaired surrogate.

    Raises:
        ValueError: it is too deep, or has a number that JSON has not.
    """
    check_depth(value)
    return _encodable(value)


def _encodable(value: Any) -> Any:
    return json.loads(replace_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False)))


def parse_turn(turn: UserTurn) -> UserTurn:
    """A text that tokenizers accept, or a checked copy of messages; see `parse_messages`."""
    return replace_surrogates(turn) if isinstance(turn, str) else parse_messages(turn)


def parse_messages(value: Any, place: str = "messages") -> tuple[Message, ...]:
    """Check and copy the messages between two replies. They do not end with the assistant; if they begin with it, that
    is a greeting. System messages are those in the middle of a conversation.

    In the copies content that is missing beside tool calls is empty, and arguments in JSON text are objects.

    Raises:
        DataError: names the message, what is there and what is accepted.
    """
    messages = _copy(value, place)
    if not isinstance(messages, list) or not messages:
        _refuse(place, messages, "a list of one or more messages")
    for number, message in enumerate(messages):
        _check_message(message, f"{place}[{number}]")
    for number, greets in ((0, "tool_calls" not in messages[0]), (len(messages) - 1, False)):
        if messages[number]["role"] == "assistant" and not greets:
            _refuse(f"{place}[{number}].role", "assistant", "user or tool at both ends, next to the model's replies")
    return tuple(messages)


def parse_tools(value: Any, place: str = "tools") -> tuple[Tool, ...]:
    """Check and copy descriptions of tools: JSON schemas, ``{"type": "function", "function": {"name": ...}}``.

    Raises:
        DataError: names the tool, what is there and what is accepted.
    """
    tools = _copy(value, place)
    if not isinstance(tools, list):
        _refuse(place, tools, "a list of tools")
    for number, tool in enumerate(tools):
        described = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(described, dict) or not _is_text(described.get("name")):
            _refuse(f"{place}[{number}]", tool, 'an object {"type": "function", "function": {"name": ...}}')
        for name, kind, accepted in (("description", str, "a text"), ("parameters", dict, "a JSON schema")):
            if not isinstance(described.get(name), kind | None):
                _refuse(f"{place}[{number}].{name}", described[name], accepted)
    return tuple(tools)


def parse_calls(value: Any, place: str = "tool_calls") -> list[dict[str, Any]]:
    """Check and copy calls of tools. Arguments in JSON text are objects in the copies.

    Raises:
        DataError: names the call, what is there and what is accepted.
    """
    calls: list[dict[str, Any]] = _copy(value, place)
    _check_calls(calls, place)
    return calls


def text_of(turn: UserTurn) -> str:
    """A turn as it is shown: each message in a line, with its role unless that is the user's."""
    return turn if isinstance(turn, str) else "\n".join(map(_shown, turn))


def question_of(turn: UserTurn) -> str:
    """The last thing that the user says in a turn; nothing if there are only results of tools."""
    if isinstance(turn, str):
        return turn
    return next((message["content"] for message in reversed(turn) if message["role"] == "user"), "")


def change_question(turn: UserTurn, change: Callable[[str], str]) -> UserTurn:
    """The turn with `question_of` changed. There must be one."""
    if isinstance(turn, str):
        return change(turn)
    last = max(number for number, message in enumerate(turn) if message["role"] == "user")
    return [*turn[:last], {**turn[last], "content": change(turn[last]["content"])}, *turn[last + 1 :]]


def as_users(messages: Sequence[Message]) -> list[Message]:
    """The messages with system messages as the user's, and neighbours of the user's as one."""
    merged = list[Message]()
    for message in messages:
        spoken = {**message, "role": "user"} if message["role"] == "system" else message
        if merged and spoken["role"] == merged[-1]["role"] == "user":
            spoken = {**spoken, "content": f"{merged.pop()['content']}\n\n{spoken['content']}"}
        merged.append(spoken)
    return merged


def with_placeholders(
    messages: Sequence[Message], is_hidden: Callable[[Message], bool]
) -> tuple[list[Message], dict[str, str]]:
    """The messages with placeholders for the content of some, and the text behind each placeholder."""
    texts = dict[str, str]()
    hidden = list[Message]()
    for number, message in enumerate(messages):
        if is_hidden(message):
            placeholder = _PLACEHOLDER.format(number)
            texts[placeholder] = message["content"]
            message = {**message, "content": placeholder}
        hidden.append(message)
    return hidden, texts


def _check_message(message: Any, place: str) -> None:
    if not isinstance(message, dict):
        _refuse(place, message, "an object with role and content")
    role = message.get("role")
    if role not in _ROLES:
        _refuse(f"{place}.role", role, f"{', '.join(_ROLES)}; the first system prompt is given with --system")
    if "tool_calls" in message:
        if role != "assistant":
            _refuse(f"{place}.role", role, "assistant, since it has tool_calls")
        _check_calls(message["tool_calls"], f"{place}.tool_calls")
        if message.get("content") is None:
            message["content"] = ""
    content = message.get("content")
    if not isinstance(content, str) or (role == "user" and not content.strip()):
        _refuse(f"{place}.content", content, "a text")


def _check_calls(calls: Any, place: str) -> None:
    if not isinstance(calls, list) or not calls:
        _refuse(place, calls, "a list of one or more calls")
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not _is_text(function.get("name")):
            _refuse(f"{place}[{number}]", call, 'an object {"function": {"name": ..., "arguments": ...}}')
        function["arguments"] = _arguments(function.get("arguments"), f"{place}[{number}].function.arguments")


def _arguments(arguments: Any, place: str) -> dict[str, Any]:
    parsed = read_arguments(arguments)
    if parsed is None:
        _refuse(place, arguments, "an object, or one in JSON text")
    return parsed


def read_arguments(arguments: Any) -> dict[str, Any] | None:
    """The arguments of a call: an object, or one in JSON text; None for a value that is neither.

    Models leave arguments out or break off their JSON, and agents send that again: nothing is no argument, and a text
    that is no JSON is the only one.
    """
    for _ in range(2):  # some agents write JSON as JSON
        if isinstance(arguments, str) and arguments.strip():
            try:
                arguments = encodable_json(json.loads(arguments, strict=False))
            except (ValueError, RecursionError):
                return {"arguments": replace_surrogates(arguments)}
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    with suppress(ValueError):
        return encodable_json(arguments) if isinstance(arguments, dict) else None
    return None


def _copy(value: Any, place: str) -> Any:
    try:
        return _encodable(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{place} cannot be written as JSON: {error}") from error


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _refuse(place: str, value: Any, accepted: str) -> NoReturn:
    shown = json.dumps(value, ensure_ascii=True)
    raise DataError(f"{place} is {shown if len(shown) <= 60 else shown[:57] + '...'}; accepted: {accepted}")


def _shown(message: Message) -> str:
    calls = [f"{_name(call)}({json.dumps(call['function']['arguments'])})" for call in message.get("tool_calls", ())]
    text = " ".join(filter(None, (message["content"], *calls)))
    return text if message["role"] == "user" else f"{message['role']}: {text}"


def _name(call: Mapping[str, Any]) -> str:
    return str(call["function"]["name"])
