"""``/v1/responses``. The next request continues after a response by its id, which nobody can guess."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as entry
from typing import Any

from h2o_stream.serve.chat import check_begun
from h2o_stream.serve.errors import ApiError, wrong
from h2o_stream.serve.messages import Dialogue, Reply, parse_dialogue
from h2o_stream.serve.replies import Done, Failed, Message, Piece, Started
from h2o_stream.serve.requests import Options, Sampled, field, is_kept, parse_sampled
from h2o_stream.serve.schemas import parse_format
from h2o_stream.serve.service import Service, finished
from h2o_stream.serve.tools import as_tool_calls, parse_tool_choice, parse_tool_options
from h2o_stream.serve.usage import report
from h2o_stream.serve.wording import renamed
from h2o_stream.session.calls import CallSplitter

_ID = re.compile(r"resp_([0-9a-f]{32})")


@dataclass(frozen=True)
class AskedResponse:
    """What a request asks.

    Attributes:
        after: the id of the response after which it continues.
        keep: whether it is saved.
        body: the request, parts of which an answer repeats.
        id: of the response.
    """

    dialogue: Dialogue
    options: Options
    sampled: Sampled
    after: str | None
    keep: bool
    body: Mapping[str, Any]
    id: str = entry(default_factory=lambda: secrets.token_hex(16))

    def replies(self, service: Service) -> Any:
        """See `Service.replies`."""
        return service.replies(self.dialogue, self.options, self.sampled, self.after, self.keep, response=self.id)


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
    sampled = parse_sampled(body, service.config.max_reply, ("max_output_tokens",), None)
    text = field(body, "text", dict) or {}
    if (schema := parse_format(text.get("format"), "text.format")) is not None:
        sampled = replace(sampled, schema=schema, place="text.format")
    if (truncation := field(body, "truncation", str)) not in (None, "auto", "disabled"):
        raise wrong("truncation", truncation, "auto or disabled; the input is read whole either way")
    sampled = parse_tool_choice(asked, sampled, options, service.special_tokens)
    check_begun(body, dialogue, sampled)
    return AskedResponse(dialogue, options, sampled, after, is_kept(body), body)


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
            before: dict[str, Any] = {"role": "assistant", "content": None}
            if messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
                before = messages.pop()
            messages.append({**before, "tool_calls": [*before.get("tool_calls", ()), call]})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind != "reasoning":
            messages.append(item)
    return messages


async def answer_response(service: Service, asked: AskedResponse) -> dict[str, Any]:
    """The whole answer."""
    async with asked.replies(service) as queues:
        end, _ = await finished(queues[0])
    return _response(service, asked, end)


def _response(service: Service, asked: AskedResponse, end: Done | None) -> dict[str, Any]:
    config, body = asked.sampled.config, asked.body
    response: dict[str, Any] = {
        "id": f"resp_{asked.id}",
        "object": "response",
        "created_at": int(time.time()),
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
        "text": {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": config.top_p,
        "truncation": body.get("truncation") or "disabled",
        "store": asked.keep,
        "metadata": body.get("metadata") or {},
    }
    if end is None:
        return response
    status = "incomplete" if end.finish == "length" else "completed"
    return response | {
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if end.finish == "length" else None,
        "output": _output(asked, end, status),
        "usage": {
            "input_tokens": end.seen.before + end.seen.read,
            "input_tokens_details": {"cached_tokens": end.seen.before},
            "output_tokens": end.seen.replied,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": end.seen.before + end.seen.read + end.seen.replied,
        },
        "h2o": report(end),
    }


def _output(asked: AskedResponse, end: Done, status: str) -> list[dict[str, Any]]:
    """The items of an answer: thinking, text and calls."""
    place = asked.id
    reply = asked.options.read(end.text) if asked.sampled.calls else Reply(end.text)
    items = [_thinking(place, end.thinking)] if end.thinking else []
    if not asked.sampled.rules and (reply.text or not reply.calls):
        items.append(_message(place, reply.text, status))
    for number, call in enumerate(as_tool_calls(reply.calls)):
        named = {"id": f"fc_{place}_{number}", "call_id": call["id"], **call["function"]}
        items.append({"type": "function_call", "status": "completed", **named})
    return items


def _thinking(place: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{place}", "type": "reasoning", "summary": [], "content": content}


def _message(place: str, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [_part(text)]
    return {"id": f"msg_{place}", "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def stream_response(
    service: Service, asked: AskedResponse, queues: Sequence[asyncio.Queue[Message]]
) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed answer. Calls come whole, after the text, and thinking with the last event."""
    events, number = _Events(service, asked), 0
    while True:
        message = await queues[0].get()
        for event in events.of(message):
            yield {**event, "sequence_number": number}
            number += 1
        if isinstance(message, Done | Failed):
            return


class _Events:
    """What is sent of a reply, message by message."""

    def __init__(self, service: Service, asked: AskedResponse) -> None:
        self._service, self._asked = service, asked
        calls = asked.options.calls if asked.sampled.calls else None
        self._splitter = CallSplitter(calls, asked.sampled.rules is not None) if calls else None
        self._texts = list[str]()

    def of(self, message: Message) -> Iterator[dict[str, Any]]:
        """The events of a message."""
        if isinstance(message, Failed):
            yield {"type": "error", **message.error.body()["error"]}
        elif isinstance(message, Started):
            created = _response(self._service, self._asked, None)
            yield {"type": "response.created", "response": created}
            yield {"type": "response.in_progress", "response": created}
        elif isinstance(message, Piece):
            yield from self._text(self._splitter.push(message.text) if self._splitter else message.text)
        else:
            rest, calls = self._splitter.flush() if self._splitter else ("", ())
            yield from self._text(rest, even_if_empty=not calls and not self._asked.sampled.rules)
            yield from self._end(message)

    def _text(self, text: str, even_if_empty: bool = False) -> Iterator[dict[str, Any]]:
        where = {"item_id": f"msg_{self._asked.id}", "output_index": 0, "content_index": 0}
        if not self._texts and (text or even_if_empty):
            item = _message(self._asked.id, None, "in_progress")
            yield {"type": "response.output_item.added", "output_index": 0, "item": item}
            yield {"type": "response.content_part.added", **where, "part": _part("")}
            self._texts.append("")
        if text:
            self._texts.append(text)
            yield {"type": "response.output_text.delta", **where, "delta": text, "logprobs": []}

    def _end(self, end: Done) -> Iterator[dict[str, Any]]:
        response = _response(self._service, self._asked, end)
        where = {"item_id": f"msg_{self._asked.id}", "output_index": 0, "content_index": 0}
        if self._texts:
            text = "".join(self._texts)
            item = _message(self._asked.id, text, response["status"])
            yield {"type": "response.output_text.done", **where, "text": text, "logprobs": []}
            yield {"type": "response.content_part.done", **where, "part": _part(text)}
            yield {"type": "response.output_item.done", "output_index": 0, "item": item}
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        for number, call in enumerate(calls, bool(self._texts)):
            place, arguments = {"item_id": call["id"], "output_index": number}, call["arguments"]
            begun = {**call, "status": "in_progress", "arguments": ""}
            yield {"type": "response.output_item.added", "output_index": number, "item": begun}
            yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
            yield {"type": "response.function_call_arguments.done", **place, "arguments": arguments,
                   "name": call["name"]}  # fmt: skip
            yield {"type": "response.output_item.done", "output_index": number, "item": call}
        yield {"type": f"response.{response['status']}", "response": response}
