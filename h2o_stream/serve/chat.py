"""``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

from h2o_stream.serve.aside import aside
from h2o_stream.serve.errors import no_response, wrong
from h2o_stream.serve.logprobs import chat_logprobs
from h2o_stream.serve.messages import Dialogue, parse_dialogue
from h2o_stream.serve.replies import Done, Failed, Started
from h2o_stream.serve.requests import Options, Sampled, field, parse_sampled
from h2o_stream.serve.service import Service, finished
from h2o_stream.serve.sse import Messages
from h2o_stream.serve.tools import as_tool_calls, parse_tool_choice, parse_tool_options
from h2o_stream.serve.usage import logprobs_of, report, slots, usage
from h2o_stream.session.calls import CallSplitter

_ID = re.compile("chatcmpl-([0-9a-f]{32})")


def previous_chat(body: Mapping[str, Any]) -> str | None:
    """The answer of which a request goes on, with what is new only.

    Raises:
        ApiError: it is no id of an answer.
    """
    if (previous := field(body, "previous_response_id", str)) is None:
        return None
    if (match := _ID.fullmatch(previous)) is None:
        raise no_response()
    return match[1]


def parse_chat(body: Mapping[str, Any], service: Service, owner: str = "") -> tuple[Dialogue, Options, Sampled]:
    """What is asked.

    Raises:
        ApiError: a field is wrong.
    """
    options = parse_tool_options(body, service.options.parse(body, owner), service.call_format)
    goes_on = previous_chat(body) is not None
    dialogue = parse_dialogue(body.get("messages"), options.read, goes_on)
    if goes_on and dialogue.past:
        raise wrong("messages", "past replies", "only what is new, with previous_response_id")
    top = field(body, "top_logprobs", int)
    if top is not None and not body.get("logprobs"):
        raise wrong("top_logprobs", top, "nothing without logprobs")
    logprobs = (top or 0) if field(body, "logprobs", bool) else None
    limits = ("max_completion_tokens", "max_tokens")
    sampled = parse_sampled(body, service.limits, limits, logprobs)
    sampled = parse_tool_choice(body, sampled, options, service.added_tokens)
    check_begun(body, dialogue, sampled)
    return dialogue, options, sampled


def check_begun(body: Mapping[str, Any], dialogue: Dialogue, sampled: Sampled) -> None:
    """Check what a request says about an assistant's message at the end, which the reply continues.

    Raises:
        ApiError: the reply would have to follow a schema, too; or the request contradicts itself.
    """
    if dialogue.begun and sampled.schema is not None:
        raise wrong(sampled.place, "set", "nothing with an assistant's message at the end, which need not follow it")
    for name, continued in (("continue_final_message", True), ("add_generation_prompt", False)):
        if (value := field(body, name, bool)) is not None and (value == continued) != bool(dialogue.begun):
            raise wrong(name, value, f"{continued} with an assistant's message at the end, {not continued} without")


def _head(kind: str, service: Service, name: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": service.name}


async def answer_chat(
    service: Service, asked: tuple[Dialogue, Options, Sampled], after: str | None, keep: bool
) -> dict[str, Any]:
    """The whole answer."""
    dialogue, options, sampled = asked
    name = secrets.token_hex(16)
    async with service.replies([dialogue], options, sampled, after, keep, response=name) as queues:
        replies = await asyncio.gather(*map(finished, queues))
    choices = []
    for number, (end, pieces) in enumerate(replies):
        message: dict[str, Any] = {"role": "assistant", "content": end.text}
        if end.thinking:
            message["reasoning_content"] = end.thinking
        if end.calls:
            message["content"] = options.read(end.text).text or None
            message["tool_calls"] = as_tool_calls(end.calls)
        if sampled.forced:
            message["content"] = None
        logprobs = None
        if sampled.logprobs is not None:
            logprobs = await aside(sampled.listed, partial(chat_logprobs, service.texts, logprobs_of(pieces)))
        choices.append({
            "index": number, "message": message, "logprobs": logprobs,
            "finish_reason": _finish(end, sampled),
        })  # fmt: skip
    ends = [end for end, _ in replies]
    head = _head("chat.completion", service, f"chatcmpl-{name}")
    return {**head, "choices": choices, "usage": usage(ends), "h2o": report(ends[0])}


def _finish(end: Done, sampled: Sampled) -> str:
    """Why a reply ended. One that was cut off may have more calls to make than it has, unless one was asked for."""
    return "tool_calls" if end.calls and (end.finish == "stop" or sampled.forced) else end.finish


async def stream_chat(
    service: Service, asked: tuple[Dialogue, Options, Sampled], name: str, messages: Messages
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a streamed answer; an error ends it. Calls of tools come whole, at the end."""
    _, options, sampled = asked
    splitters = [
        CallSplitter(options.calls, sampled.forced) if options.calls and sampled.calls else None
        for _ in range(sampled.choices)
    ]
    head = _head("chat.completion.chunk", service, f"chatcmpl-{name}")
    for number in range(sampled.choices):
        yield {**head, "choices": [_chunk(number, {"role": "assistant", "content": ""})]}
    ends: list[Done] = []
    async for number, message in messages:
        splitter = splitters[number]
        if isinstance(message, Failed):
            yield message.error.body()
            return
        if isinstance(message, Done):
            ends.append(message)
            last = {"h2o": report(message)} if number == 0 else {}
            if splitter and (text := splitter.flush()[0]):
                yield {**head, "choices": [_chunk(number, {"content": text})]}
            if message.calls:
                listed = [{"index": place, **call} for place, call in enumerate(as_tool_calls(message.calls))]
                yield {**head, "choices": [_chunk(number, {"tool_calls": listed})]}
            yield {**head, "choices": [_chunk(number, {}, _finish(message, sampled))], **last}
            continue
        if isinstance(message, Started):
            continue
        text = splitter.push(message.text) if splitter else message.text
        delta = {"content": text} if text else {}
        if message.thinking:
            delta["reasoning_content"] = message.thinking
        logprobs = None
        if sampled.logprobs is not None:
            logprobs = chat_logprobs(service.texts, message.logprobs)
        counts = {"h2o": {"slots": slots(message.counts)}} if message.counts else {}
        yield {**head, "choices": [_chunk(number, delta, None, logprobs)], **counts}
    if sampled.usage:
        yield {**head, "choices": [], "usage": usage(ends)}


def _chunk(number: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": number, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
