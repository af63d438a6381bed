"""The messages of a request as turns, and hashes by which a history that is sent again is recognised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from h2o_stream.serve.errors import wrong
from h2o_stream.session.messages import encodable

_SYSTEM = ("system", "developer")


@dataclass(frozen=True)
class Exchange:
    """A past turn: what the user said and what the model replied."""

    user: str
    reply: str


@dataclass(frozen=True)
class Dialogue:
    """A conversation as a client sends it: system prompt, past turns, and the message to answer."""

    system: str | None
    past: tuple[Exchange, ...]
    user: str


def parse_dialogue(messages: Any) -> Dialogue:
    """Check the messages of a request. System prompts come first; several messages of the user are one turn.

    Raises:
        ApiError: names the message that is wrong.
    """
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", messages, "a list of one or more messages")
    said = [_parse_message(message, f"messages[{number}]") for number, message in enumerate(messages)]
    system: list[str] = []
    while said and said[0][0] in _SYSTEM:
        system.append(said.pop(0)[1])
    past, user = list[Exchange](), list[str]()
    for number, (role, text) in enumerate(said, len(system)):
        if role in _SYSTEM:
            raise wrong(f"messages[{number}].role", role, "user or assistant; system prompts come first")
        if role == "user":
            user.append(text)
            continue
        if not user:
            raise wrong(f"messages[{number}].role", role, "user before each reply of the assistant")
        past.append(Exchange("\n\n".join(user), text))
        user = []
    if not user:
        raise wrong("messages", "an assistant's message at the end", "a user's message at the end")
    return Dialogue("\n\n".join(system) if system else None, tuple(past), "\n\n".join(user))


def _parse_message(message: Any, place: str) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise wrong(place, message, "an object with role and content")
    role = message.get("role")
    if role not in (*_SYSTEM, "user", "assistant"):
        raise wrong(f"{place}.role", role, "system, developer, user or assistant")
    if message.get("tool_calls"):
        raise wrong(f"{place}.tool_calls", message["tool_calls"], "none; this server calls no tools")
    text = parse_content(message.get("content"), f"{place}.content")
    if role == "user" and not text.strip():
        raise wrong(f"{place}.content", text, "a text that is not empty")
    return str(role), text


def parse_content(content: Any, place: str) -> str:
    """A text, or the texts of a list of parts.

    Raises:
        ApiError: it is something else.
    """
    if isinstance(content, str):
        return encodable(content)
    if not isinstance(content, list):
        raise wrong(place, content, "a text, or a list of parts of type text")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
            raise wrong(f"{place}[{number}]", part, "a part of type text")
        texts.append(encodable(part["text"]))
    return "".join(texts)


def first_hash(settings: Sequence[Any], system: str | None) -> str:
    """The hash of a conversation without turns, with these settings."""
    return _hash("", settings, system)


def next_hash(before: str, user: str, reply: str) -> str:
    """The hash of a conversation with one more turn. Space around replies does not count: clients strip it."""
    return _hash(before, user, reply.strip())


def chain(first: str, past: Iterable[Exchange]) -> list[str]:
    """The hashes of a conversation after each turn, that of none before them."""
    hashes = [first]
    for exchange in past:
        hashes.append(next_hash(hashes[-1], exchange.user, exchange.reply))
    return hashes


def _hash(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, ensure_ascii=True).encode()).hexdigest()[:32]
