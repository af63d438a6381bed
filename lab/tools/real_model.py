"""A real model of another maker behind the server: which tools it calls, and whether every call arrives as one.

    python -m lab.tools.real_model -m FILE.gguf

Not collected by pytest. The file may be named by `H2O_REAL_MODEL`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from h2o_stream.config import CacheConfig, ModelConfig
from tests.serve_load import post
from tests.served import Running


def tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    described = {key: {"type": "string", "description": text} for key, text in properties.items()}
    parameters = {"type": "object", "properties": described, "required": [*described]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("get_weather", "Get the current weather of a city.", city="Name of the city, such as Bern"),
    tool("send_email", "Send an email to somebody.", to="Who gets it", text="What it says"),
]
REQUESTS = {
    "What is the weather like in Paris?": "get_weather",
    "Is it raining in Tokyo right now?": "get_weather",
    "Write to anna@example.com that I will be late.": "send_email",
    "How warm is it in Madrid today?": "get_weather",
    "Send an email to Bob and tell him that the meeting is at 3 pm.": "send_email",
    "Do I need an umbrella in London?": "get_weather",
    "Please mail my boss that I am ill today.": "send_email",
    "Tell me the current temperature in Cairo.": "get_weather",
    "Email carla@example.com a happy birthday wish.": "send_email",
    "Will I need a coat in Oslo today?": "get_weather",
}


def ask(server: Running, text: str, choice: Any, stream: bool = False, **more: Any) -> dict[str, Any]:
    """The choice that answers a request with `TOOLS`, put together from its chunks if it is streamed."""
    body = {"messages": [{"role": "user", "content": text}], "tools": TOOLS, "tool_choice": choice, "temperature": 0,
            "max_tokens": 200, **more}  # fmt: skip
    if not stream:
        status, answer = post(server.url, "/v1/chat/completions", body)
        assert status == 200, answer
        return {**answer["choices"][0], "window": answer["h2o"]["window"]}
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    finish = None
    for chunk in _chunks(server, body):
        for part in chunk["choices"]:
            message["content"] += part["delta"].get("content") or ""
            message["tool_calls"] += part["delta"].get("tool_calls", [])
            finish = part["finish_reason"] or finish
    return {"message": message, "finish_reason": finish}


def _chunks(server: Running, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    try:
        sent = json.dumps({**body, "stream": True}), {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", *sent)
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
    finally:
        connection.close()


def names(choice: dict[str, Any]) -> list[str]:
    """What was called, whose arguments must be an object."""
    calls = [call["function"] for call in choice["message"].get("tool_calls") or []]
    assert all(isinstance(json.loads(call["arguments"]), dict) for call in calls), calls
    return [call["name"] for call in calls]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", "--model", default=os.environ.get("H2O_REAL_MODEL"), required=False)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--limit", type=int, default=len(REQUESTS))
    asked = parser.parse_args()
    if not asked.model:
        parser.error("name a file with -m or H2O_REAL_MODEL")
    with tempfile.TemporaryDirectory() as folder:
        server = Running(Path(folder), ModelConfig(asked.model), CacheConfig(window=asked.window))
        try:
            sys.exit(check(server, asked.limit))
        finally:
            server.close()


def check(server: Running, limit: int) -> int:
    """Ask everything, print what came, and return how many things were wrong."""
    right, wrong = 0, 0
    for number, (text, wanted) in enumerate(list(REQUESTS.items())[:limit]):
        for choice in ("required", "auto", {"type": "function", "function": {"name": wanted}}):
            got = ask(server, text, choice, stream=number % 2 == 1)
            called, content = names(got), got["message"]["content"]
            kind, end = str(choice)[:8], f"{got['finish_reason']} {got.get('window', '')}"
            print(f"{kind:9}{text[:40]:41}{called} {end} {content!r}")
            if choice == "required":
                right += called[:1] == [wanted]
            complete = bool(called) and got["finish_reason"] == "tool_calls" and not content
            if choice == "auto":
                hidden = any(name in (content or "") for name in ("get_weather", "send_email"))
                complete = not hidden if not called else got["finish_reason"] == "tool_calls"
            wrong += not complete or (isinstance(choice, dict) and called[:1] != [wanted])
    print(f"{right} of {limit} right with required, {wrong} answers wrong in form")
    return wrong + (right < 0.8 * limit)


if __name__ == "__main__":
    main()
