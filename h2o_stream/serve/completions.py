"""``/v1/completions``: a text is continued as it is, without a chat template and without a conversation."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from h2o_stream.base.resources import replace_surrogates
from h2o_stream.serve.aside import aside
from h2o_stream.serve.errors import wrong
from h2o_stream.serve.logprobs import TextLogprobs
from h2o_stream.serve.messages import Dialogue
from h2o_stream.serve.replies import Done, Failed, Piece
from h2o_stream.serve.requests import Options, Sampled, field, parse_sampled
from h2o_stream.serve.service import Service, finished
from h2o_stream.serve.sse import Messages, Queues
from h2o_stream.serve.usage import logprobs_of, report, usage


@dataclass(frozen=True)
class AskedCompletions:
    """What a request asks: some texts that are continued alike."""

    prompts: tuple[str, ...]
    options: Options
    sampled: Sampled

    def replies(self, service: Service) -> AbstractAsyncContextManager[Queues]:
        """See `Service.replies`; those of the first text come first."""
        dialogues = [Dialogue(None, (), prompt) for prompt in self.prompts]
        return service.replies(dialogues, self.options, self.sampled, raw=True)

    def usage(self, ends: Mapping[int, Done]) -> dict[str, Any]:
        """The usage of all replies, by their numbers."""
        of_texts = [
            usage([end for number, end in ends.items() if number // self.sampled.choices == text])
            for text in range(len(self.prompts))
        ]
        return {
            name: {inner: sum(each[name][inner] for each in of_texts) for inner in value}
            if isinstance(value, dict)
            else sum(each[name] for each in of_texts)
            for name, value in of_texts[0].items()
        }


def parse_completion(body: Mapping[str, Any], service: Service) -> AskedCompletions:
    """What is asked.

    Raises:
        ApiError: a field is wrong.
    """
    prompt = body.get("prompt")
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if not prompts or not all(isinstance(text, str) and text for text in prompts):
        raise wrong("prompt", prompt, "a text or a list of texts, not token ids")
    logprobs = field(body, "logprobs", int)
    sampled = parse_sampled(body, service.limits, ("max_tokens",), logprobs)
    return AskedCompletions(tuple(map(replace_surrogates, prompts)), service.options.parse(body, ""), sampled)


def _head(service: Service) -> dict[str, Any]:
    name = f"cmpl-{secrets.token_hex(12)}"
    return {"id": name, "object": "text_completion", "created": int(time.time()), "model": service.name}


async def answer_completion(service: Service, asked: AskedCompletions) -> dict[str, Any]:
    """The whole answer."""
    sampled = asked.sampled
    async with asked.replies(service) as queues:
        replies = await asyncio.gather(*map(finished, queues))
    choices = []
    for number, (end, pieces) in enumerate(replies):
        logprobs = None
        if sampled.logprobs is not None:
            part = partial(TextLogprobs(service.texts).part, logprobs_of(pieces))
            logprobs = await aside(sampled.listed * len(asked.prompts), part)
        choices.append({"index": number, "text": end.text, "finish_reason": end.finish, "logprobs": logprobs})
    ends = dict(enumerate(end for end, _ in replies))
    return {**_head(service), "choices": choices, "usage": asked.usage(ends), "h2o": report(ends[0])}


async def stream_completion(
    service: Service, asked: AskedCompletions, messages: Messages
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a streamed answer; an error ends it."""
    head, ends = _head(service), dict[int, Done]()
    parts = [TextLogprobs(service.texts) for _ in range(asked.sampled.choices * len(asked.prompts))]
    async for number, message in messages:
        if isinstance(message, Failed):
            yield message.error.body()
            return
        if isinstance(message, Piece):
            logprobs = None
            if asked.sampled.logprobs is not None:
                logprobs = parts[number].part(message.logprobs)
            choice = {"index": number, "text": message.text, "finish_reason": None, "logprobs": logprobs}
            yield {**head, "choices": [choice]}
        elif isinstance(message, Done):
            ends[number] = message
            choice = {"index": number, "text": "", "finish_reason": message.finish, "logprobs": None}
            yield {**head, "choices": [choice]}
    if asked.sampled.usage:
        yield {**head, "choices": [], "usage": asked.usage(ends)}
