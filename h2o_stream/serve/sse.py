"""How answers travel: whole while their clients wait, or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from h2o_stream.serve.replies import Done, Failed, Message, Started

T = TypeVar("T")

Queues = Sequence["asyncio.Queue[Message]"]
Messages = AsyncGenerator[tuple[int, Message]]
"""What comes of several replies, with their numbers."""

_DONE = b"data: [DONE]\n\n"


async def while_connected(request: Request, answer: Coroutine[Any, Any, T]) -> T:
    """An answer; if the client leaves, it is not made any more."""
    making, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((making, leaving), return_when=asyncio.FIRST_COMPLETED)
        if making.done():
            return making.result()
        raise ClientDisconnect
    finally:
        making.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def streamed(
    request: Request,
    opened: AbstractAsyncContextManager[Queues],
    chunks: Callable[[Messages], AsyncIterator[Mapping[str, Any]]],
    named: bool = False,
) -> Response:
    """Server-sent events, from the first token on.

    Args:
        request: the client's request.
        opened: gives a queue for each reply.
        chunks: makes events of what comes from them.
        named: whether events have names; else there is a last one that says so.

    Raises:
        ApiError: there will be no reply; a status says so, as without a stream.
    """

    async def all_messages() -> Messages:
        for message in first:
            yield message
        async for message in messages:
            yield message

    async def events() -> AsyncIterator[bytes]:
        async for chunk in chunks(all_messages()):
            name = f"event: {chunk['type']}\n" if named else ""
            yield f"{name}data: {json.dumps(chunk, ensure_ascii=False, allow_nan=False)}\n\n".encode()
        if not named:
            yield _DONE

    async with AsyncExitStack() as stack:

        async def begun() -> tuple[Messages, list[tuple[int, Message]]]:
            messages = merged(await stack.enter_async_context(opened))
            return messages, await _first(messages)

        messages, first = await while_connected(request, begun())
        return _Events(stack.pop_all(), events())


async def _first(messages: Messages) -> list[tuple[int, Message]]:
    """The messages up to the first token or end."""
    found = list[tuple[int, Message]]()
    async for number, message in messages:
        if isinstance(message, Failed):
            await messages.aclose()
            raise message.error
        found.append((number, message))
        if not isinstance(message, Started):
            break
    return found


async def merged(queues: Queues) -> Messages:
    """The messages of all replies, until all have ended or one fails."""
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


class _Events(StreamingResponse):
    """Sends events, and closes what they come from at the end, also if the client has left before the first one."""

    def __init__(self, opened: AsyncExitStack, events: AsyncIterator[bytes]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._opened.aclose()
