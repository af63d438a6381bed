"""Renders chat templates of models as transformers does. They are untrusted code, so they run in Jinja's sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from h2o_stream.models.template_limits import LimitedSandbox, limited

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the thinking in a message; templates read the first of them, those of gpt-oss the second."""


def render(template: str, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
    """The text that a chat template makes of messages. Values must be those of JSON.

    Raises:
        TemplateError: the template is invalid, rejects the messages, or takes more than it may (`template_limits`).
    """
    try:
        with limited(messages, variables):
            return _compiled(template).render(messages=[_normalized(message) for message in messages], **variables)
    except TemplateError:
        raise
    except Exception as error:  # templates can raise anything
        raise TemplateError((str(error) or type(error).__name__).splitlines()[0]) from error


def apply_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """What the chat template of a tokenizer, ours or transformers', makes of a conversation. Tools are JSON schemas.

    Raises:
        TemplateError: see `render`.
        ValueError: there is no template.
    """
    values = {"tools": tools, "documents": None, "add_generation_prompt": False, **variables}
    return render(tokenizer.get_chat_template(tools=tools), messages, **{**tokenizer.special_tokens_map, **values})


def _normalized(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without empty entries, and with its thinking under the names that templates read."""
    fields = {name: value for name, value in message.items() if value is not None}
    thinking = next((fields[name] for name in _REASONING if name in fields), None)
    return fields if thinking is None else {"thinking": thinking, **fields, "reasoning_content": thinking}


@lru_cache
def _compiled(template: str) -> Template:
    environment = LimitedSandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, loopcontrols],
        more_filters={"tojson": _to_json},
    )
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(template)


class _GenerationBlock(Extension):
    """``{% generation %}``, which marks replies for training and renders as its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_rendered"), [], [], content).set_lineno(line)

    def _rendered(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """``dict`` without the attributes of a class, which could leave the sandbox."""

    def __call__(self, *args: Any, **more: Any) -> dict[Any, Any]:
        return dict(*args, **more)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        """``dict.fromkeys``."""
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """``namespace`` without names that begin with an underscore, which could leave the sandbox."""

    def __init__(*args: Any, **more: Any) -> None:  # without names, since a template may name an attribute self
        self, *values = args
        attributes = dict(*values, **more)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"chat templates cannot set {name!r} in a namespace")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter ``tojson`` without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
