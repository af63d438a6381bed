"""``/v1/responses``. The next request continues after a response by its id, which nobody can guess."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as entry
from typing import Any

from h2o_stream.serve.chat import check_begun
from h2o_stream.serve.errors import ApiError, wrong
from h2o_stream.serve.messages import Dialogue, parse_dialogue
from h2o_stream.serve.replies import Done
from h2o_stream.serve.requests import Options, Sampled, field, is_kept, parse_sampled
from h2o_stream.serve.schemas import is_larger
from h2o_stream.serve.service import Service, finished
from h2o_stream.serve.tools import as_tool_calls, parse_tool_choice, parse_tool_options
from h2o_stream.serve.usage import report
from h2o_stream.serve.wording import renamed

_ID = re.compile(r"resp_([0-9a-f]{32})")

_MAX_METADATA = 2**14
"""Characters of a request's metadata, which every answer repeats; OpenAI's limits come to less."""


@dataclass(frozen=True)
class AskedResponse:
    """What a request asks.

    Attributes:
        after: the id of the response after which it continues.
        keep: whether it is saved.
        body: the request, parts of which an answer repeats.
        id: id of the response.
        created: when it was asked for, seconds since 1970.
    """

    dialogue: Dialogue
    options: Options
    sampled: Sampled
    after: str | None
    keep: bool
    body: Mapping[str, Any]
    id: str = entry(default_factory=lambda: secrets.token_hex(16))
    created: int = entry(default_factory=lambda: int(time.time()))

    def replies(self, service: Service) -> Any:
        """Ask for replies; a queue for each choice, of which only the first is kept."""
        return service.replies([self.dialogue], self.options, self.sampled, self.after, self.keep, response=self.id)


def parse_response(body: Mapping[str, Any], service: Service, owner: str = "") -> AskedResponse:
    """What is asked.

    Raises:
        ApiError: a field is wrong.
    """
    asked = {
        **body,
        "tools": _with_functions(body.get("tools")),
        "tool_choice": _with_function(body.get("tool_choice")),
    }
    options = parse_tool_options(asked, service.options.parse(body, owner), service.call_format)
    previous, instructions = field(body, "previous_response_id", str), field(body, "instructions", str)
    system = [] if instructions is None or previous else [{"role": "system", "content": instructions}]
    messages = [*system, *_as_messages(body.get("input"))]
    try:
        dialogue = parse_dialogue(messages, options.read, goes_on=previous is not None)
    except ApiError as error:
        raise renamed(error, {"messages": "input"}) from error
    after = None
    if previous is not None:
        match = _ID.fullmatch(previous)
        if match is None:
            raise ApiError(404, f"there is no response {previous[:60]}", "previous_response_id", "not_found")
        after = match[1]
        if dialogue.past:
            raise wrong("input", "past replies", "only what is new, with previous_response_id")
        system_before = service.conversations.system_before(after, owner)
        if instructions not in (None, system_before):
            raise wrong("instructions", instructions, "those of the previous response; they cannot change")
    text_format = (field(body, "text", dict) or {}).get("format")
    sampled = parse_sampled({**body, "text.format": text_format}, service.limits, ("max_output_tokens",), None)
    if (truncation := field(body, "truncation", str)) not in (None, "auto", "disabled"):
        raise wrong("truncation", truncation, "auto or disabled; the input is read whole either way")
    _check_metadata(body.get("metadata"))
    sampled = parse_tool_choice(asked, sampled, options, service.added_tokens)
    check_begun(body, dialogue, sampled)
    return AskedResponse(dialogue, options, sampled, after, is_kept(body), body)


def _check_metadata(metadata: Any) -> None:
    if metadata is None:
        return
    texts = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    if not texts or is_larger(metadata, _MAX_METADATA):
        raise wrong("metadata", metadata, f"an object of texts, all of it at most {_MAX_METADATA} characters")


def _with_functions(tools: Any) -> Any:
    """The tools of a request in the form of chat completions."""
    return [_with_function(tool) for tool in tools] if isinstance(tools, list) else tools


def _with_function(value: Any) -> Any:
    """A tool, or the choice of one, in the form of chat completions."""
    if not isinstance(value, dict) or value.get("type") != "function":
        return value
    return {"type": "function", "function": {name: x for name, x in value.items() if name != "type" and x is not None}}


def _as_messages(given: Any) -> list[Any]:
    """The input of a request as messages of chat completions: calls belong to the reply before them."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise wrong("input", given, "a text or a list of messages")
    messages = list[Any]()
    for item in given:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "function_call":
            function = {name: item.get(name) for name in ("name", "arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            before: Any = messages[-1] if messages else None
            listed = before.get("tool_calls") or [] if isinstance(before, dict) else None
            if isinstance(listed, list) and before.get("role") == "assistant":
                messages[-1] = {**before, "tool_calls": [*listed, call]}
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind != "reasoning":
            messages.append(item)
    return messages


async def answer_response(service: Service, asked: AskedResponse) -> dict[str, Any]:
    """The whole answer."""
    async with asked.replies(service) as queues:
        end, _ = await finished(queues[0])
    return describe(service, asked, end)


def describe(service: Service, asked: AskedResponse, end: Done | None) -> dict[str, Any]:
    """A response as it is now: without an end, one that has begun."""
    config, body = asked.sampled.config, asked.body
    text = body.get("text") or {}
    response: dict[str, Any] = {
        "id": f"resp_{asked.id}",
        "object": "response",
        "created_at": asked.created,
        "model": service.name,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": config.max_tokens,
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None if asked.after is None else f"resp_{asked.after}",
        "temperature": config.temperature,
        "text": {"format": _echoed_format(text.get("format"))},
        "tool_choice": _chosen(body.get("tool_choice")),
        "tools": [_echoed_tool(tool["function"]) for tool in asked.options.tools],
        "top_p": config.top_p,
        "truncation": body.get("truncation") or "disabled",
        "store": asked.keep,
        "metadata": body.get("metadata") or {},
    }
    if end is None:
        return response
    seen, status = end.seen, "incomplete" if end.finish == "length" else "completed"
    return response | {
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if end.finish == "length" else None,
        "output": _output(asked, end, status),
        "usage": {
            "input_tokens": seen.before + seen.read,
            "input_tokens_details": {"cached_tokens": seen.before, "cache_write_tokens": seen.read},
            "output_tokens": seen.replied,
            "output_tokens_details": {"reasoning_tokens": seen.thought},
            "total_tokens": seen.before + seen.read + seen.replied,
        },
        "h2o": report(end),
    }


def _echoed_format(given: Any) -> dict[str, Any]:
    kind = given.get("type") if isinstance(given, dict) else given
    if kind != "json_schema":
        return {"type": kind or "text"}
    inner = given.get("json_schema", given)
    return {"type": "json_schema", "name": str(inner.get("name") or ""), "schema": inner["schema"]}


def _chosen(choice: Any) -> Any:
    return {"type": "function", "name": choice["name"]} if isinstance(choice, dict) else choice or "auto"


def _echoed_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: function.get(name) for name in ("name", "description", "parameters")}
    return {"type": "function", **fields, "strict": function.get("strict") is True}


def _output(asked: AskedResponse, end: Done, status: str) -> list[dict[str, Any]]:
    """The items of an answer: thinking, text and calls."""
    place, text = asked.id, asked.options.read(end.text).text if end.calls else end.text
    items = [thinking_item(place, end.thinking)] if end.thinking else []
    if not asked.sampled.forced and (text or not end.calls):
        items.append(message_item(place, text, status))
    for number, call in enumerate(as_tool_calls(end.calls)):
        named = {"id": f"fc_{place}_{number}", "call_id": call["id"], **call["function"]}
        items.append({"type": "function_call", "status": "completed", **named})
    return items


def thinking_item(place: str, text: str | None) -> dict[str, Any]:
    """Thinking, or its beginning without a text."""
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{place}", "type": "reasoning", "summary": [], "content": content}


def message_item(place: str, text: str | None, status: str) -> dict[str, Any]:
    """The message of a reply, or its beginning without a text."""
    content = [] if text is None else [text_part(text)]
    return {"id": f"msg_{place}", "type": "message", "role": "assistant", "status": status, "content": content}


def text_part(text: str) -> dict[str, Any]:
    """The content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
