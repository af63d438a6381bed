"""``/v1/responses``. The id of a response names its conversation and turn, which the next request continues."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from h2o_stream.serve.errors import ApiError, wrong
from h2o_stream.serve.messages import Dialogue, parse_dialogue
from h2o_stream.serve.replies import Done, Failed, Message, Piece, Started
from h2o_stream.serve.requests import Options, Sampled, field, parse_format, parse_sampled
from h2o_stream.serve.service import Service, finished
from h2o_stream.serve.usage import report

_ID = re.compile(r"resp_([0-9a-f]{32})_(\d{1,9})")


@dataclass(frozen=True)
class AskedResponse:
    """What a request asks; `after` is the conversation and the turn that it continues."""

    dialogue: Dialogue
    options: Options
    sampled: Sampled
    after: tuple[str, int] | None
    keep: bool


def parse_response(body: Mapping[str, Any], service: Service) -> AskedResponse:
    """What is asked.

    Raises:
        ApiError: a field is wrong.
    """
    if body.get("tools"):
        raise wrong("tools", body["tools"], "none; /v1/chat/completions calls tools")
    given, instructions = body.get("input"), field(body, "instructions", str)
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(messages, list) or not messages:
        raise wrong("input", given, "a text or a list of messages")
    messages = [
        message for message in messages if not (isinstance(message, dict) and message.get("type") == "reasoning")
    ]
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    dialogue = parse_dialogue([*system, *messages])
    previous, after = field(body, "previous_response_id", str), None
    if previous is not None:
        match = _ID.fullmatch(previous)
        if match is None:
            raise ApiError(404, f"there is no response {previous[:60]}", "previous_response_id", "not_found")
        after = match[1], int(match[2])
        if dialogue.past:
            raise wrong("input", "past replies", "only what is new, with previous_response_id")
        if dialogue.system not in (None, service.conversations.system_of(match[1])):
            raise wrong("instructions", instructions, "those of the previous response; they cannot change")
    sampled = parse_sampled(body, service.config.max_reply, ("max_output_tokens",), None)
    text = field(body, "text", dict) or {}
    sampled = replace(sampled, choices=1, schema=parse_format(text.get("format"), "text.format"))
    return AskedResponse(dialogue, service.options.parse(body), sampled, after, body.get("store") is not False)


async def answer_response(service: Service, asked: AskedResponse) -> dict[str, Any]:
    """The whole answer."""
    async with service.replies(asked.dialogue, asked.options, asked.sampled, asked.after, asked.keep) as queues:
        end, _ = await finished(queues[0])
    return _response(service, asked, end.conversation, end.turn, end)


def _response(service: Service, asked: AskedResponse, name: str, turn: int, end: Done | None) -> dict[str, Any]:
    config = asked.sampled.config
    response: dict[str, Any] = {
        "id": f"resp_{name or '0' * 32}_{turn}",
        "object": "response",
        "created_at": int(time.time()),
        "model": service.name,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": asked.dialogue.system,
        "max_output_tokens": config.max_tokens,
        "output": [],
        "parallel_tool_calls": False,
        "previous_response_id": None if asked.after is None else f"resp_{asked.after[0]}_{asked.after[1]}",
        "temperature": config.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "none",
        "tools": [],
        "top_p": config.top_p,
        "metadata": {},
    }
    if end is None:
        return response
    cut = end.finish == "length"
    thinking = [{
        "id": f"rs_{name}_{turn}", "type": "reasoning", "summary": [],
        "content": [{"type": "reasoning_text", "text": end.thinking}],
    }] if end.thinking else []  # fmt: skip
    return response | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": [*thinking, _item(name, turn, end.text, "incomplete" if cut else "completed")],
        "usage": {
            "input_tokens": end.seen.before + end.seen.read,
            "input_tokens_details": {"cached_tokens": end.seen.before},
            "output_tokens": end.seen.replied,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": end.seen.before + end.seen.read + end.seen.replied,
        },
        "h2o": report(end),
    }


def _item(name: str, turn: int, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [_part(text)]
    item = {"type": "message", "role": "assistant", "status": status, "content": content}
    return {"id": f"msg_{name or '0' * 32}_{turn}", **item}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def stream_response(
    service: Service, asked: AskedResponse, queues: Sequence[asyncio.Queue[Message]]
) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed answer."""
    number, texts, name, turn = 0, list[str](), "", 0
    while True:
        message = await queues[0].get()
        for event in _events(service, asked, message, texts, (name, turn)):
            yield {**event, "sequence_number": number}
            number += 1
        if isinstance(message, Started):
            name, turn = message.conversation, message.turn
        if isinstance(message, Done | Failed):
            return


def _events(
    service: Service, asked: AskedResponse, message: Message, texts: list[str], place: tuple[str, int]
) -> list[dict[str, Any]]:
    """The events of a message; `texts` are those of the reply so far."""
    if isinstance(message, Failed):
        return [{"type": "error", **message.error.body()["error"]}]
    if isinstance(message, Started):
        created = _response(service, asked, message.conversation, message.turn, None)
        item = _item(message.conversation, message.turn, None, "in_progress")
        where = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        return [
            {"type": "response.created", "response": created},
            {"type": "response.in_progress", "response": created},
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            {"type": "response.content_part.added", **where, "part": _part("")},
        ]
    where = {"item_id": _item(*place, None, "")["id"], "output_index": 0, "content_index": 0}
    if isinstance(message, Piece):
        texts.append(message.text)
        if not message.text:
            return []
        return [{"type": "response.output_text.delta", **where, "delta": message.text, "logprobs": []}]
    response = _response(service, asked, message.conversation, message.turn, message)
    text = "".join(texts)
    return [
        {"type": "response.output_text.done", **where, "text": text, "logprobs": []},
        {"type": "response.content_part.done", **where, "part": _part(text)},
        {"type": "response.output_item.done", "output_index": 0, "item": response["output"][-1]},
        {"type": f"response.{response['status']}", "response": response},
    ]
