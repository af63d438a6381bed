"""Errors in the form that clients of the API expect."""

from __future__ import annotations

import json
from typing import Any

from h2o_stream.errors import H2OStreamError

_SHOWN = 60
"""Characters of a wrong value that an error repeats."""

_MAX_MESSAGE, _MAX_PARAM = 1000, 200
"""Characters of an error's texts, into which clients may have put names of any length."""


class ApiError(H2OStreamError):
    """A request that is refused.

    Attributes:
        status: HTTP status.
        param: the field of the request that is wrong, if it is one.
        code: a word for programs.
        retry_after_s: when to come back, if that would help.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(_cut(message, _MAX_MESSAGE))
        self.param = param and _cut(param, _MAX_PARAM)
        self.status, self.code, self.retry_after_s = status, code, retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer."""
        return {"Retry-After": str(self.retry_after_s)} if self.retry_after_s else {}


def wrong(param: str, value: Any, accepted: str) -> ApiError:
    """The error for a field that has a wrong value."""
    return ApiError(400, f"{param} is {shown(value)}; accepted: {accepted}", param)


def shown(value: Any) -> str:
    """The beginning of a value as JSON, however large it is."""
    text = ""
    for piece in json.JSONEncoder(ensure_ascii=False, default=repr).iterencode(value):
        if len(text := text + piece) > _SHOWN:
            break
    return _cut(text, _SHOWN)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def no_response() -> ApiError:
    """The error for an id of a response that its client cannot go on from."""
    message = "there is no such response, or it is not kept any more"
    return ApiError(404, message, "previous_response_id", "not_found")


def stopping() -> ApiError:
    """The error for what the server does not finish any more."""
    return ApiError(503, "the server is stopping", code="stopping")
