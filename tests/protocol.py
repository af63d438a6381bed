"""What answers of the server are, by the types of the openai package and a JSON parser that is not ours."""

import json
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from pydantic_core import from_json

from tests.served import Running

TYPES: dict[str, tuple[Any, Any]] = {
    "chat/completions": (ChatCompletion, ChatCompletionChunk),
    "completions": (Completion, Completion),
    "responses": (Response, ResponseStreamEvent),
}
ADAPTERS = {end: tuple(map(TypeAdapter, types)) for end, types in TYPES.items()}


def send(server: Running, endpoint: str, body: bytes, key: str = "") -> tuple[int, str, bytes]:
    """Status, type and bytes of an answer."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    with server.connect() as connection:
        connection.request("POST", f"/v1/{endpoint}", body, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers["content-type"], answer.read()


def answered(server: Running, endpoint: str, body: Any, key: str = "") -> tuple[int, list[Any]]:
    """Status and JSON of an answer, or of its events, all of which are of the types of the openai package."""
    data = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
    status, kind, sent = send(server, endpoint, data, key)
    if status != 200:
        error = from_json(sent, allow_inf_nan=False)["error"]
        assert kind == "application/json"
        assert status in (400, 404, 413), error
        assert error.keys() == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert len(error["message"]) < 2000
        return status, [error]
    whole, event = ADAPTERS[endpoint]
    if kind == "application/json":
        whole.validate_json(sent, strict=True)
        return status, [from_json(sent, allow_inf_nan=False)]
    assert kind.startswith("text/event-stream")
    parts = [part.removeprefix(b"event: ").partition(b"data: ") for part in sent.split(b"\n\n")]
    assert parts.pop() == (b"", b"", b"")
    if endpoint != "responses":
        assert parts.pop() == (b"", b"data: ", b"[DONE]")
    events = [from_json(data, allow_inf_nan=False) for _, _, data in parts]
    for _, _, data in parts:
        if endpoint == "completions":  # the package has no type for parts of them, which have not ended
            data = data.replace(b'"finish_reason": null', b'"finish_reason": "stop"')
        event.validate_json(data, strict=True)
    if endpoint == "responses":
        assert [name.strip().decode() for name, _, _ in parts] == [each["type"] for each in events]
        assert [each["sequence_number"] for each in events] == [*range(len(events))]
    return status, events


def whole_of(endpoint: str, events: list[Any]) -> Any:
    """What a client of a stream has in the end."""
    if endpoint == "responses":
        return texts_of(endpoint, events[-1]["response"])
    found: dict[int, list[Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        text, calls, finish = found.setdefault(choice["index"], ["", [], None])
        delta = choice.get("delta", {"content": choice.get("text")})
        calls += [(call["function"]["name"], call["function"]["arguments"]) for call in delta.get("tool_calls", ())]
        found[choice["index"]] = [text + (delta.get("content") or ""), calls, choice["finish_reason"] or finish]
    return [found[number] for number in sorted(found)]


def texts_of(endpoint: str, answer: Any) -> Any:
    """The same of an answer that came whole."""
    if endpoint == "responses":
        items = [
            (item["type"], item.get("name"), item.get("arguments"), item.get("content")) for item in answer["output"]
        ]
        return items, answer["status"]
    choices = list[Any]()
    for choice in answer["choices"]:
        message = choice.get("message", {"content": choice.get("text")})
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        choices.append([message["content"] or "", calls, choice["finish_reason"]])
    return choices


def message_of(endpoint_events: list[Any], streamed: bool) -> tuple[dict[str, Any], Any]:
    """The message that a client sends back, and the report of the server."""
    if not streamed:
        return endpoint_events[0]["choices"][0]["message"], endpoint_events[0]["h2o"]
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for event in endpoint_events:
        delta = next((x["delta"] for x in event["choices"] if x["index"] == 0), {})
        message["content"] += delta.get("content") or ""
        if "tool_calls" in delta:
            calls = [{name: call[name] for name in ("id", "type", "function")} for call in delta["tool_calls"]]
            message["tool_calls"] = [*message.get("tool_calls", ()), *calls]
    return message, next(event["h2o"] for event in endpoint_events if "conversation" in event.get("h2o", ()))
