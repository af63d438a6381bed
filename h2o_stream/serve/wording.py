"""Errors in the language of requests: fields in place of options, under the names that the request has."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from h2o_stream.errors import H2OStreamError
from h2o_stream.serve.errors import ApiError
from h2o_stream.serve.fields import FIELDS, Served

_log = logging.getLogger(__name__)

_OPTION = re.compile(r"--([a-z][a-z0-9-]*)")
_SHORT = {"temp": "temperature"}
"""Options with another name than their field."""

_SERVED = {name for fields in FIELDS.values() for name, rule in fields.items() if isinstance(rule, Served)}


def as_api_error(error: BaseException, param: str | None = None, code: str | None = None) -> ApiError:
    """An error as a client gets it.

    Args:
        error: error in a setting, a model or a reply; anything else is unexpected.
        param: the field that it is about, if the error names none.
        code: see `ApiError`.
    """
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, H2OStreamError):
        _log.error("a reply failed", exc_info=error)
        return ApiError(500, f"unexpected {type(error).__name__}")
    named = [field for option in _OPTION.findall(str(error)) if (field := _field(option)) in _SERVED]
    message = _OPTION.sub(lambda option: _said(option[1]), str(error))
    return ApiError(400, message, next(iter(named), param), code)


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error about a field, under the name that the request has for it.

    Args:
        error: its field has our name.
        names: those in the request by ours, where they differ.
    """
    ours = re.split(r"\W", error.param or "", maxsplit=1)[0]
    if (name := names.get(ours)) is None:
        return error
    own = re.compile(rf"(?<![\w.]){ours}(\[\d+\])?(?!\w)")
    message, param = own.sub(name, str(error)), own.sub(name, error.param or "")
    return ApiError(error.status, message, param, error.code, error.retry_after_s)


def _field(option: str) -> str:
    return _SHORT.get(option, option.replace("-", "_"))


def _said(option: str) -> str:
    """What a client knows of an option: the field of the same meaning, or that it belongs to the server."""
    return field if (field := _field(option)) in _SERVED else f"the server's --{option}"
