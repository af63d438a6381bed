"""The events of a streamed ``/v1/responses``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from h2o_stream.serve.replies import Done, Failed, Message, Piece, Started
from h2o_stream.serve.responses import AskedResponse, describe, message_item, text_part, thinking_item
from h2o_stream.serve.service import Service
from h2o_stream.serve.sse import Messages
from h2o_stream.session.calls import CallSplitter

_EVENTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""Parts of the names of events, by the types of items."""

_MORE: Mapping[str, Mapping[str, Any]] = {"message": {"logprobs": []}, "reasoning": {}}
"""What events about the text have besides, by the types of items."""


async def stream_response(service: Service, asked: AskedResponse, messages: Messages) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed answer. Calls come whole, after the text."""
    events, number = _Events(service, asked), 0
    async for _, message in messages:
        for event in events.of(message):
            yield {**event, "sequence_number": number}
            number += 1


class _Events:
    """What is sent of a reply, message by message."""

    def __init__(self, service: Service, asked: AskedResponse) -> None:
        self._service, self._asked = service, asked
        calls = asked.options.calls if asked.sampled.calls else None
        self._splitter = CallSplitter(calls, asked.sampled.forced) if calls else None
        self._texts: dict[str, list[str]] = {}
        self._open = ""
        self._index = 0

    def of(self, message: Message) -> Iterator[dict[str, Any]]:
        """The events of a message."""
        if isinstance(message, Failed):
            error = message.error.body()["error"]
            yield {**error, "type": "error", "error": error}  # some clients look for the one, some for the other
        elif isinstance(message, Started):
            created = describe(self._service, self._asked, None)
            yield {"type": "response.created", "response": created}
            yield {"type": "response.in_progress", "response": created}
        elif isinstance(message, Piece):
            yield from self._grow("reasoning", message.thinking)
            yield from self._grow("message", self._splitter.push(message.text) if self._splitter else message.text)
        else:
            rest = self._splitter.flush()[0] if self._splitter else ""
            yield from self._grow("message", rest, even_if_empty=not message.calls and not self._asked.sampled.forced)
            yield from self._end(message)

    def _grow(self, kind: str, text: str, even_if_empty: bool = False) -> Iterator[dict[str, Any]]:
        """Add text to the item of a kind, which is opened if it isn't yet."""
        opens = kind not in self._texts
        if not text and not (opens and even_if_empty):
            return
        if opens:
            yield from self._close("completed")
            self._open, self._texts[kind] = kind, []
            item = self._item(kind, None, "in_progress")
            yield {"type": "response.output_item.added", "output_index": self._index, "item": item}
            yield {"type": "response.content_part.added", **self._where(kind), "part": self._part_of(kind, "")}
        if text:
            self._texts[kind].append(text)
            yield {"type": f"response.{_EVENTS[kind]}.delta", **self._where(kind), "delta": text, **_MORE[kind]}

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        """Close the item that is open."""
        if kind := self._open:
            text = "".join(self._texts[kind])
            yield {"type": f"response.{_EVENTS[kind]}.done", **self._where(kind), "text": text, **_MORE[kind]}
            yield {"type": "response.content_part.done", **self._where(kind), "part": self._part_of(kind, text)}
            item = self._item(kind, text, status)
            yield {"type": "response.output_item.done", "output_index": self._index, "item": item}
            self._open, self._index = "", self._index + 1

    def _item(self, kind: str, text: str | None, status: str) -> dict[str, Any]:
        return message_item(self._asked.id, text, status) if kind == "message" else thinking_item(self._asked.id, text)

    def _part_of(self, kind: str, text: str) -> dict[str, Any]:
        return text_part(text) if kind == "message" else {"type": "reasoning_text", "text": text}

    def _where(self, kind: str) -> dict[str, Any]:
        return {"item_id": self._item(kind, None, "")["id"], "output_index": self._index, "content_index": 0}

    def _end(self, end: Done) -> Iterator[dict[str, Any]]:
        response = describe(self._service, self._asked, end)
        yield from self._close(response["status"])
        for call in (item for item in response["output"] if item["type"] == "function_call"):
            place, arguments = {"item_id": call["id"], "output_index": self._index}, call["arguments"]
            begun = {**call, "status": "in_progress", "arguments": ""}
            yield {"type": "response.output_item.added", "output_index": self._index, "item": begun}
            yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
            yield {"type": "response.function_call_arguments.done", **place, "arguments": arguments,
                   "name": call["name"]}  # fmt: skip
            yield {"type": "response.output_item.done", "output_index": self._index, "item": call}
            self._index += 1
        yield {"type": f"response.{response['status']}", "response": response}
