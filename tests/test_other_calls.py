"""Calls that are not written as the template writes them, whole and piece by piece; and what is no call."""

import json
import time
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_stream.serve.messages import parse_dialogue
from h2o_stream.session import other_calls
from h2o_stream.session.calls import CallFormat, CallSplitter
from h2o_stream.session.other_calls import Call, certain_size, read_calls
from tests.test_tools import TIME, WEATHER

NAMES = frozenset({"weather", "time"})
FORMS = [
    CallFormat("<tool_call>", "</tool_call>", "arguments").of([WEATHER, TIME]),
    CallFormat("", "", "parameters").of([WEATHER, TIME]),
    CallFormat("[TOOL_CALLS]", "", "arguments", listed=True).of([WEATHER, TIME]),
]
CITIES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)

OBJECTS = [
    lambda name, given: {"name": name, "arguments": given},
    lambda name, given: {"name": name, "parameters": given},
    lambda name, given: {"name": name, "arguments": json.dumps(given)},
    lambda name, given: {"type": "function", "function": {"name": name, "arguments": given}},
    lambda name, given: {"function": {"name": name, "parameters": json.dumps(given)}},
    lambda name, given: {"id": "call_1", "type": "function", "name": name, "args": given},
    lambda name, given: {"function": name, "arguments": given},
    lambda name, given: {"tool": name, "input": given},
    lambda name, given: {"tool_calls": [{"function": {"name": name, "arguments": given}}]},
    lambda name, given: {"arguments": given, "name": name},
]
"""What models make of a call."""

CLOTHES = ["{}", "```json\n{}\n```", "```\n{}\n```", "<tool_call>\n{}\n</tool_call>", "<tools>{}</tools>",
           "<|python_tag|>{}", "<function_call> {} </function_call>", "[{}]"]  # fmt: skip
"""What they put around it."""


def streamed(form: CallFormat, pieces: Any) -> tuple[str, tuple[Call, ...], str]:
    """What is given at once, the calls, and the text at the end."""
    splitter = CallSplitter(form)
    given = "".join(map(splitter.push, pieces))
    text, calls = splitter.flush()
    return given, calls, text


class TestCalls:
    @pytest.mark.every(3)
    @pytest.mark.parametrize("form", FORMS, ids=["tags", "bare", "listed"])
    @settings(max_examples=30, derandomize=True, deadline=None)
    @given(data=st.data(), before=st.sampled_from(["", "Let me look {it} up.\n", "Sure: "]),
           after=st.sampled_from(["", "\n", "\nI hope that helps."]))  # fmt: skip
    def test_in_any_clothes_it_arrives_as_one(self, form: CallFormat, data: Any, before: str, after: str) -> None:
        make, clothes = data.draw(st.sampled_from(OBJECTS)), data.draw(st.sampled_from(CLOTHES))
        calls = [Call("weather", {"city": data.draw(CITIES)}), Call("time", {})][: data.draw(st.integers(1, 2))]
        indent = data.draw(st.sampled_from([None, 2]))
        written = [json.dumps(make(call.name, dict(call.arguments)), indent=indent) for call in calls]
        text = before + "\n".join(clothes.replace("{}", each) for each in written) + after
        rest, found = form.parse(text)
        assert found == tuple(calls)
        assert "weather" not in rest
        given, found, end = streamed(form, text)
        assert found == tuple(calls)
        assert "weather" not in given + end
        assert (given + end).split() == rest.split()
        assert given.strip() == before.strip(), "what comes before is not held back"

    def test_several_in_one_block(self) -> None:
        one, two = ('{"name": "weather", "arguments": {"city": "Bern"}}', '{"name": "time", "arguments": {}}')
        wanted = (Call("weather", {"city": "Bern"}), Call("time", {}))
        for between, block in product(("\n", ", ", "; ", ""), ("{}", "```json\n{}\n```")):
            assert read_calls(block.replace("{}", one + between + two), NAMES)[1] == wanted
        assert read_calls(f"```json\n[{one}, {two}]\n```", NAMES) == ("", wanted)

    @pytest.mark.parametrize("text", [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}\n</tool_call>',
        '```json\n[{"name": "weather", "arguments": {"city": "Bern"}}\n```',
    ])  # fmt: skip
    def test_brackets_that_are_left_out(self, text: str) -> None:
        for form in FORMS:
            assert form.parse(text)[1] == (Call("weather", {"city": "Bern"}),)
            assert streamed(form, text)[1] == (Call("weather", {"city": "Bern"}),)

    def test_a_name_alone_is_a_call_without_arguments(self) -> None:
        assert read_calls('{"name": "time"}', NAMES) == ("", (Call("time", {}),))
        assert read_calls('{"name": "time", "arguments": null}', NAMES) == ("", (Call("time", {}),))


NO_CALLS = [
    '{"name": "Bob", "arguments": {}}', '{"name": "Bob", "age": 3}', '{"name": "weather", "age": 3}',
    '{"names": ["weather"]}', '[{"name": "weather", "arguments": {}}, {"name": "other", "arguments": {}}]',
    '{"plan": {"name": "weather", "arguments": {}}}', '```json\n{"city": "Bern"}\n```',
    "```python\nprint({'name': 'weather'})\n```", "```\nweather\n```",
    "a < b, [1, 2] and {x} in <b>bold</b> or `code`; weather", '{"name": "weather", "arguments": {"city": "Ber',
    "[[[[[[[[", "{" * 3000, '{"name": "weather", "arguments": [1]}',
]  # fmt: skip


class TestText:
    @pytest.mark.parametrize("form", FORMS, ids=["tags", "bare", "listed"])
    @pytest.mark.parametrize("text", NO_CALLS, ids=range(len(NO_CALLS)))
    def test_what_names_no_tool_is_none(self, form: CallFormat, text: str) -> None:
        assert form.parse(text) == (text, ())
        given, calls, end = streamed(form, text[:400])
        assert (given + end, calls) == (text[:400], ())

    @pytest.mark.parametrize("text", [
        '{"name": "Bob", "arguments": 3', '{"city": ', "```python\nimport os", "```json\n[1, ", "<b>bold",
        "a [link] {x", '{"name": "weathervane"', "[1, 2, 3",
    ])  # fmt: skip
    def test_it_streams_as_soon_as_it_cannot_be_one(self, text: str) -> None:
        assert certain_size(text, NAMES)[0] == len(text)

    @pytest.mark.parametrize("text", [
        "{", '{"', '{"na', '{"name"', '{"name": "wea', '{"name": "weather", "arg', "```", "```js", "```json\n", "[ {",
        "<tool", "<tools>\n", '{"type": "function", "function": {"name": "time"', '{"arguments": {"a": 1}, "name": ',
    ])  # fmt: skip
    def test_what_may_be_one_is_held_back(self, text: str) -> None:
        if '"name": "wea' in text and "weather" not in text:
            text = text.replace("wea", "weather")
        assert certain_size(f"Text. {text}", NAMES)[0] == len("Text. ")

    def test_without_tools_nothing_is_looked_for(self) -> None:
        text = '{"name": "weather", "arguments": {"city": "Bern"}}'
        assert CallFormat("<tool_call>", "</tool_call>", "arguments").parse(text) == (text, ())


class TestHistories:
    @pytest.mark.parametrize(("arguments", "read"), [
        ("", {}), (None, {}), (" ", {}), ("{}", {}), ('{"city": "Be', {"arguments": '{"city": "Be'}),
        ("Bern", {"arguments": "Bern"}), ('"{\\"city\\": \\"Bern\\"}"', {"city": "Bern"}),
        ('{"city": "a\nb"}', {"city": "a\nb"}),
    ])  # fmt: skip
    def test_arguments_of_any_kind_go_on(self, arguments: Any, read: Any) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        parts = [{"type": "text", "text": "18"}, {"type": "text", "text": "degrees"}]
        said = [
            {"role": "user", "content": "Warm?"},
            {"role": "assistant", "tool_calls": [call, {**call, "id": "2"}]},
            {"role": "tool", "tool_call_id": "1", "content": parts},
            {"role": "tool", "tool_call_id": "2", "content": None},
        ]
        dialogue = parse_dialogue(said)
        assert [each.arguments for each in dialogue.past[0].reply.calls] == [read, read]
        assert [message["content"] for message in dialogue.user] == ["18\ndegrees", ""]  # type: ignore[index]

    def test_an_assistant_that_said_nothing_goes_on(self) -> None:
        for silent in ({"role": "assistant"}, {"role": "assistant", "content": None}):
            dialogue = parse_dialogue([{"role": "user", "content": "a"}, silent, {"role": "user", "content": "b"}])
            assert dialogue.past[0].reply.text == ""


BEGUN = '{"name": "weather", "arguments": {"x": '


@pytest.mark.parametrize(
    ("first", "unit"),
    [*(("", unit) for unit in ("{", '{"', '{"name":', "[{", '{"name": "weather", ', '<tool_call>{"name":', "{ }x{")),
     (BEGUN, " "), (f'{BEGUN}"', " "), (f"{BEGUN}1", "\n")],
)  # fmt: skip
def test_texts_that_would_take_long(first: str, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As histories have them that somebody made up; what is looked at in vain is limited, for any length."""
    form = CallFormat("<tool_call>", "</tool_call>", "arguments", names=frozenset({"weather"}))
    looked, read = [0], other_calls._read

    def counted(text: str, start: int) -> Any:
        looked[0] += len(text)
        return read(text, start)

    monkeypatch.setattr(other_calls, "_read", counted)
    started = time.thread_time()
    for size, count in ((2000, 10), (200_000, 1), (4_000_000, 1)):
        text = first + unit * (size // len(unit))
        for _ in range(count):
            assert form.parse(text)[0].startswith(first + unit)
    assert looked[0] < 10 * other_calls._MAX_WORK
    assert time.thread_time() - started < 5


def test_a_call_after_much_code() -> None:
    code = "if (x) { y[0] = {}; }\n" * 300
    assert read_calls(f'{code}{{"name": "weather", "arguments": {{}}}}', {"weather"})[1] == (Call("weather", {}),)
