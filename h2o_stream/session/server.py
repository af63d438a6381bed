"""A running server as the model of a chat, by OpenAI's API: what was said is kept here, the cache is there."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import Request, urlopen

from h2o_stream.base.json_text import parse_json
from h2o_stream.base.resources import replace_surrogates
from h2o_stream.config.serve import check_key
from h2o_stream.errors import ConfigError, DataError

_MAX_BYTES = 2**24
"""Most bytes of an answer, or of a line of it."""

_SLOTS = ("seen", "cached", "window", "evicted")


class Server:
    """A server's model.

    Args:
        url: URL of the server, with or without ``/v1``.
        key: API key for the server, if it needs one.
        model: name of the model; None is the server's first one.

    Raises:
        ConfigError: this is no URL.
        DataError: there is no server, or it does not let us in.
    """

    def __init__(self, url: str, key: str | None = None, model: str | None = None) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            (parts.hostname or "").encode("idna")
            known = parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:
            known = False
        if not known:
            raise ConfigError(f"{url!r} is no address of a server; --server takes one like http://127.0.0.1:8000")
        if key is not None and not check_key(key, "--api-key").isascii():
            raise ConfigError("--api-key has other characters than those that keys have: letters, digits and the like")
        self.url = urlunsplit(parts._replace(path=parts.path.rstrip("/") or "/v1"))
        self._key = key
        with self._open("models") as response:
            models = self._parse(response.read(_MAX_BYTES)).get("data")
        first = models[0] if isinstance(models, list) and models else None
        if not isinstance(first, dict) or not (name := _text(first.get("id"))):
            raise self._error("it has no model")
        self.model = model or name

    def reply(
        self,
        messages: Callable[[], Sequence[Mapping[str, Any]]],
        new: Sequence[Mapping[str, Any]],
        previous: str | None,
        options: Mapping[str, Any],
    ) -> Generator[dict[str, Any], None, None]:
        """The chunks of a reply to a conversation, see `_checked`. Closing the iterator stops the reply.

        Args:
            messages: returns the whole conversation.
            new: the messages after the answer `previous`.
            previous: the id of an answer from which an h2o-serve goes on, if it still knows it.
            options: fields of the request.

        Raises:
            DataError: the server refuses the request, or is gone.
        """
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self.model, **streaming, **options}
        response = None
        if previous is not None:
            with suppress(DataError):
                response = self._open("chat/completions", {**body, "messages": new, "previous_response_id": previous})
        with response or self._open("chat/completions", {**body, "messages": messages()}) as response:
            try:
                for line in iter(partial(response.readline, _MAX_BYTES), b""):
                    if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                        yield _checked(self._parse(line.removeprefix(b"data: ")))
            except (OSError, HTTPException) as error:
                raise self._error(f"the connection broke: {error}") from error

    def _open(self, path: str, body: Mapping[str, Any] | None = None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})
            if self._key is not None:  # not for whom the server names in its place
                request.add_unredirected_header("Authorization", f"Bearer {self._key}")
            response: HTTPResponse = urlopen(request)
            return response
        except HTTPError as error:
            raise self._error(_message(error.read(_MAX_BYTES)) or f"{error.code} {error.reason}") from error
        except (OSError, HTTPException, ValueError) as error:  # of names and numbers that no address has
            reason = getattr(error, "reason", error)
            raise self._error(f"{getattr(reason, 'strerror', None) or reason}; does h2o-serve run there?") from error

    def _parse(self, text: bytes) -> dict[str, Any]:
        if reason := _message(text):
            raise self._error(reason)
        try:
            answer = parse_json(text)
        except ValueError as error:
            raise self._error("what answers is no server of models") from error
        if not isinstance(answer, dict):
            raise self._error("what answers is no server of models")
        return answer

    def _error(self, reason: str) -> DataError:
        return DataError(f"--server {self.url}: {reason}")


def _message(text: bytes) -> str:
    """The message of an error that a server has sent; empty for anything else."""
    with suppress(ValueError, KeyError, TypeError):
        return replace_surrogates(str(parse_json(text)["error"]["message"]))
    return ""


def _checked(chunk: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat shows of a chunk, each part of the type that it should have; nothing in place of others."""
    usage, slots = _counts(chunk.get("usage")), _counts(_object(chunk.get("h2o")).get("slots"))
    details = _counts(_object(chunk.get("usage")).get("prompt_tokens_details"))
    choices = chunk.get("choices")
    checked = []
    for choice in map(_object, choices if isinstance(choices, list) else ()):
        delta = _object(choice.get("delta"))
        texts = {name: _text(delta.get(name)) for name in ("content", "reasoning_content")}
        checked.append({"delta": texts, "finish_reason": _text(choice.get("finish_reason"))})
    return {
        "id": _text(chunk.get("id")),
        "usage": usage | ({"prompt_tokens_details": details} if usage else {}),
        "h2o": {"slots": slots} if slots.keys() >= {*_SLOTS} else {},
        "choices": checked,
    }


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return replace_surrogates(value) if isinstance(value, str) else ""


def _counts(value: Any) -> dict[str, int]:
    return {name: count for name, count in _object(value).items() if type(count) is int and 0 <= count < 2**63}
