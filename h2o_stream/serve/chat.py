"""``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from h2o_stream.serve.errors import wrong
from h2o_stream.serve.messages import Dialogue, parse_dialogue
from h2o_stream.serve.replies import Done, Failed, Message, Started
from h2o_stream.serve.requests import Options, Sampled, field, parse_sampled
from h2o_stream.serve.service import Service, finished
from h2o_stream.serve.tools import as_tool_calls, parse_tool_choice, parse_tool_options
from h2o_stream.serve.usage import chat_logprobs, logprobs_of, report, slots, usage
from h2o_stream.session.calls import CallSplitter


def parse_chat(body: Mapping[str, Any], service: Service, owner: str = "") -> tuple[Dialogue, Options, Sampled]:
    """What is asked.

    Raises:
        ApiError: a field is wrong.
    """
    options = parse_tool_options(body, service.options.parse(body, owner), service.call_format)
    dialogue = parse_dialogue(body.get("messages"), options.read)
    top = field(body, "top_logprobs", int)
    if top is not None and not body.get("logprobs"):
        raise wrong("top_logprobs", top, "nothing without logprobs")
    logprobs = (top or 0) if field(body, "logprobs", bool) else None
    limits = ("max_completion_tokens", "max_tokens")
    sampled = parse_sampled(body, service.config.max_reply, limits, logprobs)
    sampled = parse_tool_choice(body, sampled, options, service.special_tokens)
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


async def answer_chat(service: Service, asked: tuple[Dialogue, Options, Sampled], keep: bool) -> dict[str, Any]:
    """The whole answer."""
    dialogue, options, sampled = asked
    async with service.replies(dialogue, options, sampled, keep=keep) as queues:
        replies = await asyncio.gather(*map(finished, queues))
    choices = []
    for number, (end, pieces) in enumerate(replies):
        message: dict[str, Any] = {"role": "assistant", "content": end.text}
        if end.thinking:
            message["reasoning_content"] = end.thinking
        reply = options.read(end.text) if sampled.calls else None
        if reply and (reply.calls or sampled.rules):
            message["content"] = None if sampled.rules else reply.text or None
        if reply and reply.calls:
            message["tool_calls"] = as_tool_calls(reply.calls)
        logprobs = None
        if sampled.logprobs is not None:
            logprobs = chat_logprobs(service.model.tokenizer, logprobs_of(pieces))
        choices.append({
            "index": number, "message": message, "logprobs": logprobs,
            "finish_reason": _finish(end, sampled, called="tool_calls" in message),
        })  # fmt: skip
    ends = [end for end, _ in replies]
    head = _head("chat.completion", service, f"chatcmpl-{secrets.token_hex(12)}")
    return {**head, "choices": choices, "usage": usage(ends), "h2o": report(ends[0])}


def _finish(end: Done, sampled: Sampled, called: bool) -> str:
    """Why a reply ended. One that was cut off may have more calls to make than it has, unless one was asked for."""
    return "tool_calls" if called and (end.finish == "stop" or sampled.rules) else end.finish


async def stream_chat(
    service: Service, asked: tuple[Dialogue, Options, Sampled], queues: Sequence[asyncio.Queue[Message]]
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a streamed answer; an error ends it. Calls of tools come whole, at the end."""
    _, options, sampled = asked
    splitters = [
        CallSplitter(options.calls, sampled.rules is not None) if options.calls and sampled.calls else None
        for _ in queues
    ]
    head = _head("chat.completion.chunk", service, f"chatcmpl-{secrets.token_hex(12)}")
    for number in range(len(queues)):
        yield {**head, "choices": [_chunk(number, {"role": "assistant", "content": ""})]}
    ends: list[Done] = []
    async for number, message in merged(queues):
        splitter = splitters[number]
        if isinstance(message, Failed):
            yield message.error.body()
            return
        if isinstance(message, Done):
            ends.append(message)
            last = {"h2o": report(message)} if number == 0 else {}
            text, calls = splitter.flush() if splitter else ("", ())
            if text:
                yield {**head, "choices": [_chunk(number, {"content": text})]}
            if calls:
                listed = [{"index": place, **call} for place, call in enumerate(as_tool_calls(calls))]
                yield {**head, "choices": [_chunk(number, {"tool_calls": listed})]}
            yield {**head, "choices": [_chunk(number, {}, _finish(message, sampled, called=bool(calls)))], **last}
            continue
        if isinstance(message, Started):
            continue
        text = splitter.push(message.text) if splitter else message.text
        delta = {"content": text} if text else {}
        if message.thinking:
            delta["reasoning_content"] = message.thinking
        logprobs = None
        if sampled.logprobs is not None:
            logprobs = chat_logprobs(service.model.tokenizer, message.logprobs)
        held = {"h2o": {"slots": slots(message.counts)}} if message.counts else {}
        yield {**head, "choices": [_chunk(number, delta, None, logprobs)], **held}
    if sampled.usage:
        yield {**head, "choices": [], "usage": usage(ends)}


def _chunk(number: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": number, "delta": delta, "finish_reason": finish, "logprobs": logprobs}


async def merged(queues: Sequence[asyncio.Queue[Message]]) -> AsyncIterator[tuple[int, Message]]:
    """The messages of all replies, with their numbers, until all have ended or one fails."""
    if len(queues) == 1:
        while True:
            message = await queues[0].get()
            yield 0, message
            if isinstance(message, Done | Failed):
                return
    waits = {asyncio.ensure_future(waiting.get()): number for number, waiting in enumerate(queues)}
    try:
        while waits:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number, message = waits.pop(task), task.result()
                yield number, message
                if not isinstance(message, Done | Failed):
                    waits[asyncio.ensure_future(queues[number].get())] = number
    finally:
        for task in waits:
            task.cancel()
