"""Calls of tools in replies: how a model writes them, found by what its template makes of some; read and forced.

Most models write each call as JSON between markers, or a list of calls, or a name and the JSON of its arguments. Models
that write them otherwise, as XML for example, have no format here. Nothing calls a tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jinja2 import TemplateError

from h2o_stream.base.resources import replace_surrogates
from h2o_stream.engine.grammar import literal
from h2o_stream.engine.text import overlap, shared_length
from h2o_stream.models.rendering import apply_template
from h2o_stream.session.messages import Tool, encodable_json
from h2o_stream.session.other_calls import Call, calls_in, certain_size, read_calls

_USER, _REPLY, _RESULT = "6e1b-the-user-asks-93fd", "41ac-the-reply-27e0", "d80f-the-result-5c36"
_NAME, _OTHER = "tool_b6a1f", "tool_c93e0"
_ARGUMENTS = {"place": "e4f7-an-argument"}
_SPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_REFUSALS = (TemplateError, TypeError, ValueError, AttributeError, LookupError)
"""What templates raise on messages that they do not know."""
_MAX_CALLS = 8
"""Calls in a reply that must call."""
_URI = re.compile(r"[a-z]+:[\w:/.~-]+", re.ASCII)
_MAX_SIZE = 2**18
"""Characters of a text with calls."""

_PYTHON = "<|python_tag|>"
"""With which Llama may begin a call, though its template does not."""


@dataclass(frozen=True)
class CallFormat:
    """How a model writes its calls.

    Attributes:
        opening: what is before a call; nothing if the reply itself is one.
        closing: what is after it.
        key: key of the arguments in the JSON of a call; empty if the name stands before it.
        between: what is between such a name and the arguments.
        listed: whether all calls are one list.
        outer: the key of the object that has name and arguments, if they are not at the top.
        several: whether a reply may have several calls.
        names: names of the given tools. A text in another form that names one of them is a call, too.
    """

    opening: str
    closing: str
    key: str
    between: str = ""
    listed: bool = False
    outer: str = ""
    several: bool = True
    names: frozenset[str] = field(default=frozenset(), compare=False)

    def of(self, tools: Sequence[Tool]) -> CallFormat:
        """This format where these tools are given."""
        return replace(self, names=frozenset(tool.get("function", tool)["name"] for tool in tools))

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that calls are recognised by."""
        return tuple(filter(None, (self.opening, self.closing, self.between))) or (_PYTHON,)

    def parse(self, text: str) -> tuple[str, tuple[Call, ...]]:
        """The text of a reply without its calls, and these. A call that is cut off after complete ones is dropped; any
        other that is not complete is text, and so is all of what no model writes, for its length.
        """
        if len(text) > _MAX_SIZE:
            return text, ()
        parsed = self._parse(text)
        return parsed if parsed[1] or not self.names else read_calls(text, self.names)

    def _parse(self, text: str) -> tuple[str, tuple[Call, ...]]:
        if not self.opening:
            bare = tuple(self._bare(text.strip().removeprefix(_PYTHON)))
            known = bare if not self.names or all(call.name in self.names for call in bare) else ()
            return ("", known) if known else (text, ())
        texts, calls, rest = list[str](), list[Call](), text
        while True:
            before, marker, after = rest.partition(self.opening)
            parsed = self._at(after) if marker else None
            if parsed is None:
                break
            texts.append(before)
            calls += parsed[0]
            rest = parsed[1].lstrip().removeprefix(self.closing)
        if not calls:
            return text, ()
        rest, _, _ = rest.partition(self.opening)
        return " ".join(filter(None, map(str.strip, (*texts, rest)))), tuple(calls)

    def _bare(self, text: str) -> Iterator[Call]:
        while text:
            parsed = self._at(text)
            if parsed is None:
                return
            yield from parsed[0]
            text = parsed[1].lstrip("; \n")

    def _at(self, text: str) -> tuple[list[Call], str] | None:
        """The calls with which a text begins, and what follows them."""
        name, text = "", text.lstrip()
        if not self.key:
            name, _, text = text.partition(self.between)
            if not name.strip():
                return None
        try:
            value, end = json.JSONDecoder().raw_decode(text.lstrip())
            calls = [self._call(each, name.strip()) for each in (value if isinstance(value, list) else [value])]
        except (ValueError, RecursionError):
            return None
        found_calls = [call for call in calls if call is not None]
        return (found_calls, text.lstrip()[end:]) if calls and len(found_calls) == len(calls) else None

    def _call(self, value: Any, name: str) -> Call | None:
        arguments = value
        if not name:
            value = value.get(self.outer) if self.outer and isinstance(value, dict) else value
            if not isinstance(value, dict) or not isinstance(value.get("name"), str):
                return None
            name = value["name"]
            if not name.strip() or not (self.opening or self.key in value):
                return None
            if others := calls_in(value):
                return others[0]
            arguments = value.get(self.key, {})
        return Call(replace_surrogates(name), encodable_json(arguments)) if isinstance(arguments, dict) else None

    def grammar(
        self, tools: Sequence[Tool], special: Mapping[str, int], several: bool, text: Mapping[str, Any] | None = None
    ) -> str:
        """The grammar, in llguidance's form of Lark, of replies that call one of the tools, or several of them.

        Special tokens, by their texts, are not text to the grammar. `text` is the JSON schema of replies that call
        nothing; None if they must.
        """
        functions = [tool.get("function", tool) for tool in tools]
        documents = _documents(functions)
        write = partial(_json, lenient=not all(function.get("strict") is True for function in functions))
        more = several and self.several
        if self.key:
            items = {"anyOf": [self._schema(x["name"], y) for x, y in zip(functions, documents, strict=True)]}
            listed = {"type": "array", "items": items, "minItems": 1, **({} if more else {"maxItems": 1})}
            call = write(listed if self.listed else items)
        else:
            between = literal(self.between, special)
            call = " | ".join(
                f"{json.dumps(x['name'])} {between} {write(y)}" for x, y in zip(functions, documents, strict=True)
            )
        repeated = f'call more{{0,{_MAX_CALLS - 1}}} "\\n"?' if more and not self.listed and self.opening else "call"
        opening, before = literal(self.opening, special), "SPACE?" if self.opening and self.key else ""
        after = f"SPACE? {literal(self.closing, special)}" if self.closing else ""
        start = repeated if text is None else f"calls | text\ncalls: {repeated}\ntext: %json {json.dumps(text)}"
        return (
            f"%llguidance {{}}\nstart: {start}\ncall: {opening} {before} body {after}\n"
            f'more: "\\n" call\nbody: {call}\nSPACE: /[ \\n]/\n'
        )

    def _schema(self, name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        properties = {"name": {"const": name}, self.key: parameters}
        schema = {"type": "object", "properties": properties, "required": ["name", self.key],
                  "additionalProperties": False}  # fmt: skip
        if not self.outer:
            return schema
        wrapped = {"type": {"const": "function"}, self.outer: schema}
        return {"type": "object", "properties": wrapped, "required": [*wrapped], "additionalProperties": False}


class CallSplitter:
    """Splits a reply that comes piece by piece: what is certainly no call is given at once, the rest is held back.

    Of a `forced` reply nothing is text, also if its last call was cut off.
    """

    def __init__(self, call_format: CallFormat, forced: bool = False) -> None:
        self._form, self._forced, self._text, self._given, self._passed = call_format, forced, "", 0, 0

    def push(self, text: str) -> str:
        """Append text. Returns what is no part of a call."""
        self._text += text
        start, self._given = self._given, max(self._given, 0 if self._forced else self._certain_size())
        return self._text[start : self._given]

    def flush(self) -> tuple[str, tuple[Call, ...]]:
        """What was held back and is no call, and the calls."""
        text, calls = self._form.parse(self._text[self._given :])
        if self._forced:
            return "", calls
        return (f" {text}" if calls and text and self._text[: self._given].strip() else text), calls

    def _certain_size(self) -> int:
        """How much of the text is no part of a call, whatever follows."""
        call_format, text = self._form, self._text
        if not call_format.opening and not call_format.names:
            start = text.lstrip()
            return 0 if not start or start[0] in "{[" or _PYTHON.startswith(start[: len(_PYTHON)]) else len(text)
        opening, first, text = call_format.opening or _PYTHON, self._passed, text[self._passed :]
        place = text.find(opening)
        size = passed = len(text) - overlap(text, opening) if place < 0 else place
        if call_format.names:
            size, passed = certain_size(text[:size], call_format.names)
        size = len(text[:size].rstrip())
        self._passed = first + min(size, passed)
        return first + size


def find_format(tokenizer: Any) -> CallFormat | None:
    """How the model of a tokenizer writes calls, by its chat template; None if that is unknown, or it has no tools."""

    def render(*messages: Mapping[str, Any]) -> str:
        history = [
            {"role": "user", "content": _USER},
            *messages,
            {"role": "tool", "content": _RESULT, "tool_call_id": _ID},
        ]
        return apply_template(tokenizer, history, [_TOOL]).rpartition(_USER)[2]

    try:
        plain = render({"role": "assistant", "content": _REPLY})
        one = render(_calling(_NAME))
    except _REFUSALS:
        return None
    header, _, tail = plain.partition(_REPLY)
    call_format = _format(one, header, tail)
    if call_format is None or call_format.parse(_written(one, header, tail)) != ("", (Call(_NAME, _ARGUMENTS),)):
        return None
    try:
        two = _written(render(_calling(_NAME, _OTHER)), header, tail)
    except _REFUSALS:
        two = ""
    several = call_format.parse(two)[1] == (Call(_NAME, _ARGUMENTS), Call(_OTHER, _ARGUMENTS))
    return replace(call_format, several=several)


_ID = "a1b2c3d4e"
_TOOL = {
    "type": "function",
    "function": {
        "name": "tool_of_the_list",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "Where."}}},
    },
}


def _calling(*names: str) -> dict[str, Any]:
    calls = [{"id": _ID, "type": "function", "function": {"name": name, "arguments": _ARGUMENTS}} for name in names]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _written(rendered: str, header: str, tail: str) -> str:
    """What the assistant has written, of a rendered turn that begins with a header and ends with a tail."""
    rendered = rendered[shared_length(rendered, header) :]
    return rendered[: len(rendered) - shared_length(rendered[::-1], tail[::-1])]


def _format(rendered: str, header: str, tail: str) -> CallFormat | None:
    written = _written(rendered, header, tail)
    for place in (place for place, letter in enumerate(written) if letter in "{["):
        try:
            value, size = json.JSONDecoder().raw_decode(written[place:])
        except ValueError:
            continue
        before, after = written[:place], written[place + size :].strip()
        listed = isinstance(value, list)
        call = value[0] if listed and value else value
        if not isinstance(call, dict):
            continue
        if call == _ARGUMENTS and before.count(_NAME) == 1:
            opening, _, between = before.partition(_NAME)
            return _marked(CallFormat(opening.strip(), after, "", between.strip(), listed))
        outer = next((key for key, value in call.items() if isinstance(value, dict) and "name" in value), "")
        call = call[outer] if outer else call
        key = next((key for key, value in call.items() if value in (_ARGUMENTS, json.dumps(_ARGUMENTS))), "")
        if key and call.get("name") == _NAME:
            return _marked(CallFormat(before.strip(), after, key, "", listed, outer))
    return None


def _marked(call_format: CallFormat) -> CallFormat | None:
    """The format, if its calls can be recognised in text, and no id is part of it."""
    marked = not call_format.opening or call_format.opening[0] in "<[" or "<" in call_format.opening
    named = call_format.key or (call_format.opening and call_format.between)
    return call_format if marked and named and not any(_ID in marker for marker in call_format.markers) else None


def _documents(functions: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The parameters of functions, each with an id of its own: where it is part of another schema, what it refers to is
    still inside itself.
    """
    documents = dict[str, Mapping[str, Any]]()
    for number, function in enumerate(functions):
        schema = function.get("parameters")
        parameters = dict(schema) if isinstance(schema, Mapping) and schema else {"type": "object"}
        parameters.pop("$schema", None)  # old ones have other names for ids
        uri = str(parameters.get("$id"))
        uri = uri if _URI.fullmatch(uri) and uri not in documents else f"urn:function:{number}"
        documents[uri] = {**parameters, "$id": uri}
    return list(documents.values())


def _json(schema: Mapping[str, Any], lenient: bool) -> str:
    """A schema as a part of a grammar, with space only where templates write it.

    Unless it is strict, what no grammar can say is left out, as if the model called by itself.
    """
    return f"%json {json.dumps({**schema, 'x-guidance': {**_SPACE, 'lenient': lenient, 'coerce_one_of': lenient}})}"
