"""``/v1/completions``: a text is continued as it is, without a chat template and without a conversation."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from h2o_stream.serve.chat import merged
from h2o_stream.serve.errors import wrong
from h2o_stream.serve.messages import Dialogue
from h2o_stream.serve.replies import Done, Failed, Message, Piece
from h2o_stream.serve.requests import Options, Sampled, field, parse_sampled
from h2o_stream.serve.service import Service, finished
from h2o_stream.serve.usage import logprobs_of, report, text_logprobs, usage
from h2o_stream.session.messages import encodable


def parse_completion(body: Mapping[str, Any], service: Service) -> tuple[Dialogue, Options, Sampled]:
    """What is asked.

    Raises:
        ApiError: a field is wrong.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise wrong("prompt", prompt, "one text")
    for name in ("suffix", "echo", "best_of", "tools"):
        if body.get(name) not in (None, False, "", 1, []):
            raise wrong(name, body[name], "nothing; this server does not support it")
    logprobs = field(body, "logprobs", int)
    sampled = parse_sampled(body, service.config.max_reply, ("max_tokens",), logprobs)
    return Dialogue(None, (), encodable(prompt)), service.options.parse(body), sampled


def _head(service: Service) -> dict[str, Any]:
    name = f"cmpl-{secrets.token_hex(12)}"
    return {"id": name, "object": "text_completion", "created": int(time.time()), "model": service.name}


async def answer_completion(service: Service, asked: tuple[Dialogue, Options, Sampled]) -> dict[str, Any]:
    """The whole answer."""
    dialogue, options, sampled = asked
    async with service.replies(dialogue, options, sampled, raw=True) as queues:
        replies = await asyncio.gather(*map(finished, queues))
    choices = []
    for number, (end, pieces) in enumerate(replies):
        logprobs = None
        if sampled.logprobs is not None:
            logprobs = text_logprobs(service.model.tokenizer, logprobs_of(pieces))
        choices.append({"index": number, "text": end.text, "finish_reason": end.finish, "logprobs": logprobs})
    ends = [end for end, _ in replies]
    return {**_head(service), "choices": choices, "usage": usage(ends), "h2o": report(ends[0])}


async def stream_completion(
    service: Service, sampled: Sampled, queues: Sequence[asyncio.Queue[Message]]
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a streamed answer; an error ends it."""
    head, ends = _head(service), list[Done]()
    async for number, message in merged(queues):
        if isinstance(message, Failed):
            yield message.error.body()
            return
        if isinstance(message, Piece):
            logprobs = None
            if sampled.logprobs is not None:
                logprobs = text_logprobs(service.model.tokenizer, message.logprobs)
            choice = {"index": number, "text": message.text, "finish_reason": None, "logprobs": logprobs}
            yield {**head, "choices": [choice]}
        elif isinstance(message, Done):
            ends.append(message)
            choice = {"index": number, "text": "", "finish_reason": message.finish, "logprobs": None}
            yield {**head, "choices": [choice]}
    if sampled.usage:
        yield {**head, "choices": [], "usage": usage(ends)}
