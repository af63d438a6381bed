"""The messages of a request as turns, and hashes by which a history that is sent again is recognised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from h2o_stream.base.resources import replace_surrogates
from h2o_stream.errors import DataError
from h2o_stream.serve.errors import ApiError, wrong
from h2o_stream.serve.schemas import size_of
from h2o_stream.session.messages import Message, UserTurn, parse_calls
from h2o_stream.session.other_calls import Call

_SYSTEM = ("system", "developer")

MAX_MESSAGES = 4096
"""Messages of a turn, those of the user not joined yet."""

_PER_MESSAGE = 32
"""Characters that take as long to read as a message without any."""


@dataclass(frozen=True)
class Reply:
    """A reply: its text, and the tools that it calls."""

    text: str
    calls: tuple[Call, ...] = ()

    @property
    def size(self) -> int:
        """Characters of it."""
        return len(self.text) + sum(size_of([call.name, call.arguments, call.id]) for call in self.calls)


@dataclass(frozen=True)
class Exchange:
    """A past turn: what came before the reply, from the user or from tools, and the reply. Before a greeting is ()."""

    user: UserTurn
    reply: Reply


@dataclass(frozen=True)
class Dialogue:
    """A conversation as a client sends it: system prompt, past turns, and the message, or results, to answer.

    Attributes:
        begun: the reply continues this text.
        size: characters of all of it, calls included.
        parts: those of each past turn, and last of what is answered, with some more for each message.
    """

    system: str | None
    past: tuple[Exchange, ...]
    user: UserTurn
    begun: str = ""
    size: int = field(init=False, compare=False)
    parts: Sequence[int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        sizes = [_size(exchange.user) + exchange.reply.size for exchange in self.past] + [_size(self.user)]
        counts = [_count(turn) for turn in (*(exchange.user for exchange in self.past), self.user)]
        object.__setattr__(self, "size", len(self.system or "") + sum(sizes))
        parts = [size + _PER_MESSAGE * count for size, count in zip(sizes, counts, strict=True)]
        object.__setattr__(self, "parts", parts)


def parse_dialogue(messages: Any, read: Callable[[str], Reply] = Reply, goes_on: bool = False) -> Dialogue:
    """Check the messages of a request.

    System prompts at the start of a conversation are one, later ones belong to the turn that they are in, as several
    messages of the user do; several of the assistant are one. A system prompt alone is answered as a message.

    Args:
        messages: messages of the request.
        read: finds the calls in the text of a reply.
        goes_on: whether there were messages before, which are not sent again.

    Raises:
        ApiError: names the message that is wrong.
    """
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", messages, "a list of one or more messages")
    parsed = [_parse_message(message, f"messages[{number}]") for number, message in enumerate(messages)]
    later = next(
        (number for number, message in enumerate(parsed) if goes_on or message["role"] != "system"), len(parsed)
    )
    system, parsed = [message["content"] for message in parsed[:later]], parsed[later:]
    if not parsed and "".join(system).strip():
        return Dialogue(None, (), "\n\n".join(system))
    turns, new = list[tuple[list[Message], list[Reply]]](), list[Message]()
    may_answer = goes_on
    for number, message in enumerate(parsed, later):
        role = message["role"]
        if role == "tool" and not may_answer:
            raise wrong(f"messages[{number}].role", role, "tool only after an assistant's message with tool_calls")
        if role != "assistant":
            new.append(message)
            continue
        reply = _parse_reply(message, read)
        if not turns or _has_content(new):
            turns.append((new, []))
            may_answer = False
        turns[-1][1].append(reply)
        may_answer, new = may_answer or bool(reply.calls), []
    past = [Exchange(_turn(asked), _joined(replies)) for asked, replies in turns]
    _check_count(past, _turn(new))
    prompt = "\n\n".join(system) if system else None
    if _has_content(new):
        return Dialogue(prompt, tuple(past), _turn(new))
    if new or not past:
        raise wrong(f"messages[{len(messages) - 1}].content", messages[-1]["content"], "a text that is not empty")
    last = past.pop()
    if not last.user or last.reply.calls:
        accepted = "a message of the user or a tool at the end, or before a text of the assistant that is continued"
        raise wrong("messages", "an assistant's message at the end", accepted)
    return Dialogue(prompt, tuple(past), last.user, last.reply.text)


def _check_count(past: Sequence[Exchange], new: UserTurn) -> None:
    """Refuse turns of too many messages, as they are fed: the whole of such a turn is in the hands of the template."""
    count = most = 0
    for exchange in past:
        count += _count(exchange.user) + 1
        most = max(most, count)
        count = count if exchange.reply.calls or not exchange.user else 0
    if (most := max(most, count + _count(new))) > MAX_MESSAGES:
        accepted = f"at most {MAX_MESSAGES} between two replies without calls"
        raise wrong("messages", f"{most} messages", accepted)


def _has_content(messages: Sequence[Message]) -> bool:
    """Whether there is anything to answer."""
    return any(message["role"] == "tool" or message["content"].strip() for message in messages)


def _joined(replies: Sequence[Reply]) -> Reply:
    text = "\n\n".join(reply.text for reply in replies if reply.text)
    return Reply(text, tuple(call for reply in replies for call in reply.calls))


def _turn(messages: Sequence[Message]) -> UserTurn:
    messages = [message for message in messages if _has_content([message])]
    if messages and all(message["role"] == "user" for message in messages):
        return "\n\n".join(message["content"] for message in messages)
    return tuple(messages)


def _parse_reply(message: Message, read: Callable[[str], Reply]) -> Reply:
    reply = read(message["content"])
    calls = [
        Call(call["function"]["name"], call["function"]["arguments"], str(call.get("id") or ""))
        for call in message.get("tool_calls", ())
    ]
    return Reply(reply.text, (*reply.calls, *calls))


def _parse_message(message: Any, place: str) -> Message:
    if not isinstance(message, dict):
        raise wrong(place, message, "an object with role and content")
    role, calls = message.get("role"), message.get("tool_calls") or ()
    if role not in (*_SYSTEM, "user", "assistant", "tool"):
        raise wrong(f"{place}.role", role, "system, developer, user, assistant or tool")
    role, content = "system" if role in _SYSTEM else role, message.get("content")
    if content is None and role in ("assistant", "tool"):
        content = ""
    text = parse_content(content, f"{place}.content")
    parsed: dict[str, Any] = {"role": role, "content": text}
    for name in ("tool_call_id", "name") if role == "tool" else ():
        if (value := message.get(name)) is not None and not isinstance(value, str):
            raise wrong(f"{place}.{name}", value, "a text")
        parsed |= {name: value} if value is not None else {}
    if calls:
        if role != "assistant":
            raise wrong(f"{place}.tool_calls", calls, "none but in an assistant's message")
        try:
            parsed["tool_calls"] = parse_calls(calls, f"{place}.tool_calls")
        except DataError as error:
            raise ApiError(400, str(error), f"{place}.tool_calls") from error
    return parsed


def parse_content(content: Any, place: str) -> str:
    """A text, or the texts of a list of parts, a line each, as by llama.cpp and vLLM.

    Raises:
        ApiError: it is something else.
    """
    if isinstance(content, str):
        return replace_surrogates(content)
    if not isinstance(content, list):
        raise wrong(place, content, "a text, or a list of parts of type text")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
            raise wrong(f"{place}[{number}]", part, "a part of type text; this server reads texts only")
        texts.append(replace_surrogates(part["text"]))
    return "\n".join(texts)


@dataclass(frozen=True)
class FedTurn:
    """A past turn as it is fed, or with the reply None the one to answer, and the exchanges that it consists of."""

    user: UserTurn
    reply: str | None
    exchanges: tuple[Exchange, ...]


def as_fed(past: Iterable[Exchange], last: UserTurn) -> Iterator[FedTurn]:
    """Past turns as they are fed, and the last one, which is to be answered.

    A reply with calls is fed with their results, and a greeting with its answer, as messages of one turn: only the
    template knows how they are written.
    """
    messages, merged = list[Message](), list[Exchange]()
    for exchange in past:
        if exchange.reply.calls or not exchange.user:
            messages += [*_messages(exchange.user), _calling(exchange.reply)]
            merged.append(exchange)
            continue
        user = (*messages, *_messages(exchange.user)) if messages else exchange.user
        yield FedTurn(user, exchange.reply.text, (*merged, exchange))
        messages, merged = [], []
    yield FedTurn((*messages, *_messages(last)) if messages else last, None, tuple(merged))


def _size(turn: UserTurn) -> int:
    return len(turn) if isinstance(turn, str) else sum(size_of([*message.values()]) for message in turn)


def _count(turn: UserTurn) -> int:
    return 1 if isinstance(turn, str) else len(turn)


def _messages(turn: UserTurn) -> Sequence[Message]:
    return [{"role": "user", "content": turn}] if isinstance(turn, str) else turn


def _calling(reply: Reply) -> Message:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.calls
    ]
    return {"role": "assistant", "content": reply.text, **({"tool_calls": calls} if calls else {})}


def first_hash(settings: Sequence[Any], system: str | None) -> str:
    """The hash of a conversation without turns, with these settings."""
    return _hash("", settings, system)


def next_hash(before: str, exchange: Exchange) -> str:
    """The hash of a conversation with one more turn: of all that a template may write. Space around replies does not
    count: clients strip it.
    """
    reply = exchange.reply
    calls = [[(call.name, call.arguments, call.id) for call in reply.calls]] if reply.calls else []
    return _hash(before, exchange.user, reply.text.strip(), *calls)


def chain(first: str, past: Iterable[Exchange]) -> list[str]:
    """The hashes of a conversation after each turn, that of none before them."""
    hashes = [first]
    for exchange in past:
        hashes.append(next_hash(hashes[-1], exchange))
    return hashes


def _hash(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, ensure_ascii=True, sort_keys=True).encode()).hexdigest()[:32]
