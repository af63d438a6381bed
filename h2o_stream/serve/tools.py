"""Tools in requests and their calls in answers, in the forms of chat completions."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from h2o_stream.errors import DataError
from h2o_stream.serve.errors import ApiError, wrong
from h2o_stream.serve.requests import Options, Sampled, field
from h2o_stream.serve.schemas import is_larger
from h2o_stream.session.calls import CallFormat
from h2o_stream.session.messages import Tool, parse_tools
from h2o_stream.session.other_calls import Call

_ID_LETTERS, _ID_SIZE = string.ascii_letters + string.digits, 9
"""What Mistral's templates accept as the id of a call."""


MAX_TOOLS = 2**18
"""Characters and values of all tools of a request."""


def parse_tool_options(body: Mapping[str, Any], options: Options, form: CallFormat | None) -> Options:
    """The options of a conversation with the tools of a request.

    Args:
        body: the request.
        options: the same without tools.
        form: how the model writes calls; None if it does not call tools.

    Raises:
        ApiError: the tools are wrong, or the model does not call any.
    """
    tools = field(body, "tools", list)
    if not tools:
        return options
    if is_larger(tools, MAX_TOOLS):
        message = f"tools are kept with the system prompt, and must have fewer than {MAX_TOOLS} characters"
        raise ApiError(400, message, "tools", "context_length_exceeded")
    try:
        parsed = parse_tools(tools)
    except DataError as error:
        raise ApiError(400, str(error), "tools") from error
    for number, tool in enumerate(parsed):
        if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise wrong(f"tools[{number}].type", tool.get("type"), "function")
    if form is None:
        raise ApiError(
            400, "the chat template of this model has no tools, or writes their calls in a form that is not known; "
            "leave tools out, or use another model", "tools", "tools_not_supported",
        )  # fmt: skip
    return replace(options, tools=parsed, calls=form.of(parsed))


def parse_tool_choice(
    body: Mapping[str, Any], sampled: Sampled, options: Options, special: Mapping[str, int]
) -> Sampled:
    """How a reply is sampled that may call tools, must, or must not.

    Args:
        body: the request.
        sampled: the same without regard to tools.
        options: options of the conversation, with the tools.
        special: see `CallFormat.grammar`.

    Raises:
        ApiError: the choice is wrong.
    """
    choice, parallel = body.get("tool_choice"), field(body, "parallel_tool_calls", bool)
    if options.calls is None:
        if choice not in (None, "none", "auto"):
            raise wrong("tool_choice", choice, "none or auto, without tools")
        return sampled
    if choice in (None, "auto", "none"):
        if choice == "none" or isinstance(sampled.schema, str):
            return sampled
        several = parallel is not False
        schema = sampled.schema
        rules = None if schema is None else options.calls.grammar(options.tools, special, several, schema)
        return replace(sampled, calls=True, rules=rules)
    called = _named(choice, options.tools) if choice != "required" else options.tools
    if not called:
        raise wrong("tool_choice", choice, "auto, none, required, or the name of a function among tools")
    if sampled.schema is not None:
        raise wrong("tool_choice", choice, "auto or none, with response_format")
    several = choice == "required" and parallel is not False
    return replace(sampled, calls=True, forced=True, rules=options.calls.grammar(called, special, several))


def _named(choice: Any, tools: Sequence[Tool]) -> list[Tool]:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return [tool for tool in tools if tool["function"]["name"] == name]


def named(calls: Sequence[Call]) -> tuple[Call, ...]:
    """Calls with new ids."""
    return tuple(replace(call, id="".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_SIZE))) for call in calls)


def as_tool_calls(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Calls as a message has them."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in calls
    ]
