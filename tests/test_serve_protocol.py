"""Whatever is asked: answers are what they claim to be, streamed or not, and refusals come before the first byte.

Longer: ``pytest tests/test_serve_protocol.py --hypothesis-profile long`` until it is interrupted.
"""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json
from transformers import PreTrainedTokenizerBase

from h2o_stream.base.registry import Registry
from h2o_stream.config import POLICIES
from h2o_stream.serve.fields import FIELDS as SERVED_FIELDS
from h2o_stream.serve.fields import Served
from tests.native_builds import needs_library
from tests.protocol import answered, message_of, send, texts_of, whole_of
from tests.served import Running, serving
from tests.test_serve_calls import ODD_JSON
from tests.test_serve_tools import STRICT, calling
from tests.test_tools import TIME

pytestmark = needs_library


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Iterator[Running]:
    with serving(tmp_path_factory, calling(tokenizer), context=1600) as running:
        yield running


RESPONSE_TOOL = {"type": "function", **STRICT["function"]}  # type: ignore[dict-item]
ODD_TOOLS = [[{**RESPONSE_TOOL, name: odd}] for name in RESPONSE_TOOL for odd in (None, "x", 5, [], {})]
ODD_CALLS = [f'<tool_call>{{"name": "time", "arguments": {{"x": {odd}}}}}' for odd in ODD_JSON]
TEXTS = st.sampled_from(
    ["Hi.", "日本語 é 😀", "<|im_end|>", "x<|im_end|", ">", "", " ", "\n\n", "\ud800", "a" * 3000, "\0", *ODD_CALLS]
)
ODD = st.one_of(
    st.sampled_from([None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, -(10**400)]),
    st.sampled_from([1e-40, 1e308, 0.5, 2.0, -1.0, "", "x", "\udfff"]),
    st.recursive(st.none(), lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2)),
)  # fmt: skip
SCHEMA = {
    "type": "object", "properties": {"é": {"enum": ["日本", "\n"]}}, "required": ["é"], "additionalProperties": False,
}  # fmt: skip
LIMITS = st.sampled_from([5, 12, 0, -3])
FORMS: dict[str, Any] = {
    **dict.fromkeys(("json_schema", "guided_json"), st.sampled_from([SCHEMA, json.dumps(SCHEMA), "{", {"type": 5}])),
    "format": st.sampled_from(["json", "", SCHEMA]),
    **dict.fromkeys(("grammar", "guided_grammar"), st.sampled_from(['root ::= "yes"', "start: /[a-c]{1,5}/", "x ="])),
    "guided_regex": st.sampled_from(["[a-c]{2}/", "(", "a\\"]),
    "guided_choice": st.sampled_from([["yes", "😀"], [""], [], ['\0/"']]),
    "structured_outputs": st.sampled_from([{"regex": "[a-c]{2}"}, {"json": SCHEMA}, {"json_object": False}, {"x": 1}]),
}
NUMBERS: dict[str, Any] = {
    **FORMS, **dict.fromkeys(("n_predict", "num_predict"), LIMITS),
    "think": st.sampled_from([True, False, "low", "no"]), "presence_penalty": st.sampled_from([0, 2, -1.5]),
    "repeat_penalty": st.sampled_from([1, 1.2]), "repeat_last_n": st.sampled_from([-1, 0, 5]),
    "dry_multiplier": st.sampled_from([0, 0.8, 1e6]), "dry_base": st.sampled_from([1, 1.75, 9]),
    "dry_allowed_length": st.sampled_from([0, 2, 1.5]),
    "options": st.sampled_from([{"temperature": 0, "num_predict": 5}, {"top_k": 2.0}, {"stop": ["e"]}, {}]),
    "temperature": st.sampled_from([0, 0.0, 1, 2.5, 1e-40, 1e-300]), "top_p": st.sampled_from([1, 0.5, 1e-9]),
    "top_k": st.sampled_from([-1, 0, 1, 40, 10**6]), "min_p": st.sampled_from([0, 0.05, 1.0]),
    "repetition_penalty": st.sampled_from([1, 1.3, 1e-300, 1e300]), "frequency_penalty": st.sampled_from([0, 2, -2]),
    "seed": st.sampled_from([0, 7, -1, 2**63 - 1]), "stop": st.sampled_from(["e", ["a", " "], [], ["😀"]]),
    "min_tokens": st.sampled_from([0, 3, 100]), "ignore_eos": st.booleans(),
    "logit_bias": st.sampled_from([{"5": 100}, [["e", False]], [[3, 1.5]], {"99999999": 1}, {"\ud800": 1}]),
    "window": st.sampled_from([64, 300, 1, 2**40]), "policy": st.sampled_from(["h2o", "recent", "keydiff", "full"]),
    "recall": st.sampled_from(["auto", "off"]), "pins": st.sampled_from([[], ["Keep."], ["\ud800"]]),
    "stream_options": st.sampled_from([{"include_usage": True}, {"include_slots": True}, {}]),
    "user": TEXTS, "model": TEXTS, "metadata": st.sampled_from([{"a": "b"}, {"\ud800": "x"}, {}]),
}  # fmt: skip
OF_CHAT: dict[str, Any] = {
    "tool_choice": st.sampled_from(["auto", "none", "required"]),
    "parallel_tool_calls": st.booleans(), "store": st.booleans(),
    "thinking_budget_tokens": st.sampled_from([-1, 0, 5]),
    "reasoning_effort": st.sampled_from(["none", "low", "high", "most"]), "enable_thinking": st.booleans(),
    "reasoning": st.sampled_from([{"effort": "low"}, {"effort": "none"}, {}]),
    "chat_template_kwargs": st.sampled_from([{"enable_thinking": True}, {"thinking_budget": 3}, {"x": 1}, {}]),
    "reasoning_budget_message": TEXTS, "previous_response_id": st.sampled_from(["x", "resp_1", "chatcmpl-" + "0" * 32]),
    **dict.fromkeys(("reasoning_budget_tokens", "thinking_token_budget"), st.sampled_from([-1, 0, 5])),
}  # fmt: skip
PARTS = st.just([{"type": "text", "text": "Hi."}])
CALLS = st.sampled_from([
    [{"id": "a", "type": "function", "function": {"name": "time", "arguments": arguments}}]
    for arguments in ("{}", {"place": "x"}, "{", "[1]", "\ud800", None, *ODD_CALLS)
])  # fmt: skip
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "x"])},
        optional={"content": TEXTS | PARTS, "tool_call_id": TEXTS, "tool_calls": CALLS},
    ),
    min_size=1, max_size=4,
)  # fmt: skip
ITEMS = st.lists(
    st.sampled_from([
        {"role": "user", "content": "Hi."}, {"type": "message", "role": "user", "content": "Hi."},
        {"type": "function_call", "call_id": "a", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "5"}, {"type": "reasoning", "summary": []},
        *({"role": "assistant", "content": "x", "tool_calls": calls} for calls in (None, 5, [], {})),
        {"type": "x"}, None,
    ]),
    max_size=4,
)  # fmt: skip
PLAIN = [{"role": "user", "content": "Hi."}]
FORMAT = st.just({"type": "json_object", "schema": SCHEMA})
SEVERAL = {**dict.fromkeys(("n", "n_cmpl"), st.sampled_from([1, 2])), "max_tokens": LIMITS}
LOGPROBS = {"logprobs": st.booleans(), "top_logprobs": st.sampled_from([0, 2, 20])}
FIELDS: dict[str, dict[str, Any]] = {
    "chat/completions": {
        **NUMBERS, **OF_CHAT, **LOGPROBS, **SEVERAL, "messages": MESSAGES, "max_completion_tokens": LIMITS,
        "continue_final_message": st.booleans(), "add_generation_prompt": st.booleans(),
        "tools": st.sampled_from([[STRICT, TIME], []]), "response_format": FORMAT,
    },
    "completions": {
        **NUMBERS, **SEVERAL, "logprobs": st.sampled_from([0, 3]), "response_format": FORMAT,
        "prompt": st.lists(TEXTS, max_size=2),
    },
    "responses": {
        **NUMBERS, **OF_CHAT, "input": MESSAGES | ITEMS | TEXTS, "max_output_tokens": LIMITS,
        "instructions": TEXTS, "tools": st.sampled_from([[RESPONSE_TOOL], *ODD_TOOLS]),
        "truncation": st.sampled_from(["auto", "disabled", "x"]),
        "text": st.sampled_from([
            {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}, {"format": "json_object"}, {},
        ]),
        "conversation": st.just("c"), "background": st.booleans(), "prompt": st.just({"id": "p"}),
    },
}  # fmt: skip
BASE: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": PLAIN, "max_tokens": 12, "temperature": 0},
    "completions": {"prompt": "Hi.", "max_tokens": 12, "temperature": 0},
    "responses": {"input": "Hi.", "max_output_tokens": 12, "temperature": 0},
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """An endpoint and a request: some fields with values that clients send, and seldom one with any value, or any value
    somewhere inside.
    """
    endpoint = draw(st.sampled_from([*FIELDS]))
    names = draw(st.lists(st.sampled_from([*FIELDS[endpoint]]), max_size=5, unique=True))
    body = copy.deepcopy(BASE[endpoint]) | {name: copy.deepcopy(draw(FIELDS[endpoint][name])) for name in names}
    if names and not draw(st.integers(0, 3)):
        inside: Any = body
        key: Any = names[0]
        while isinstance(inside[key], dict | list) and inside[key] and draw(st.booleans()):
            inside = inside[key]
            key = draw(st.sampled_from([*inside] if isinstance(inside, dict) else range(len(inside))))
        inside[key] = draw(ODD)
    return endpoint, body


def test_all_served_fields_are_asked_for() -> None:
    for endpoint, fields in SERVED_FIELDS.items():
        served = {name for name, rule in fields.items() if isinstance(rule, Served) and "." not in name}
        assert served <= {*FIELDS[endpoint], "stream"}


@given(requests())
def test_any_request(server: Running, request_: tuple[str, dict[str, Any]]) -> None:
    """The status is the same streamed, and so is the text if it is not drawn."""
    endpoint, body = request_
    status, (whole,) = answered(server, endpoint, body)
    streamed, events = answered(server, endpoint, {**body, "stream": True})
    assert streamed == status, (whole, events)
    if status != 200:
        assert events[0]["message"] == whole["message"]
        return
    if endpoint == "responses":
        responses = [event["response"] for event in events if "response" in event]
        assert len({response["created_at"] for response in responses}) == 1
        asked = (body.get("text") or {}).get("format")
        kind = asked.get("type") if isinstance(asked, dict) else asked
        assert whole["text"]["format"]["type"] == (kind or "text")
    drawn = body.get("temperature") != 0 and body.get("seed", -1) in (-1, None)
    assert drawn or whole_of(endpoint, events) == texts_of(endpoint, whole)
    if "choices" in whole and body.get("logprobs") is not None:
        check_logprobs(whole, events, drawn)


def check_logprobs(whole: Any, events: list[Any], drawn: bool) -> None:
    """Their bytes are those of the text, and the parts of a stream have what an answer has."""
    for choice in whole["choices"]:
        logprobs = choice["logprobs"]
        if logprobs is None:
            continue
        parts = [x["logprobs"] for each in events for x in each["choices"] if x["index"] == choice["index"]]
        if "content" in logprobs:
            said = b"".join(bytes(each["bytes"] or ()) for each in logprobs["content"])
            assert (choice["message"]["content"] or "") in said.decode("utf-8", "replace")
            streamed = [each for part in parts if part for each in part["content"]]
            assert drawn or len(streamed) == len(logprobs["content"])
            assert all(-1e4 < x["logprob"] <= 0 for each in streamed for x in (each, *each["top_logprobs"]))
        else:
            offsets = [offset for part in parts if part for offset in part["text_offset"]]
            assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
            assert offsets == sorted(offsets)


@pytest.mark.parametrize("more", [
    {"text": {"format": {"schema": SCHEMA}}},
    {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}, "guided_regex": "a"},
])  # fmt: skip
def test_what_a_reply_must_be_has_a_type_and_is_asked_for_once(server: Running, more: dict[str, Any]) -> None:
    status, (error,) = answered(server, "responses", BASE["responses"] | more)
    assert status == 400
    assert "text.format" in error["message"]


RAW: list[bytes] = [
    b"", b"[]", b"3", b"nothing", b"[" * 100_000, b'{"a": ' * 100_000, b"\xff\xfe{", b'{"prompt": "\xed\xa0\x80"}',
    b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
    b'{"prompt": "x", "x": Infinity}', b'{"prompt": "x", "x": 1e999}', b'{"prompt": "x", "x": "\\udc00"}',
    b'{"prompt": "x", "\\ud800": 1}', '{"prompt": "x"}'.encode("utf-16"),
]  # fmt: skip


@pytest.mark.parametrize("body", RAW, ids=lambda body: repr(body[:20]))
def test_what_is_no_json_is_refused(server: Running, body: bytes) -> None:
    status, _, sent = send(server, "completions", body)
    assert (status, from_json(sent)["error"]["code"]) == (400, "invalid_json")


DEEP: Any = "x"
for _ in range(300):
    DEEP = [DEEP]


@pytest.mark.parametrize("endpoint", FIELDS)
@pytest.mark.parametrize(
    "name", ["metadata", "tools", "tool_choice", "input", "messages", "response_format", "text", "x"]
)
def test_nothing_is_too_deep(server: Running, endpoint: str, name: str) -> None:
    tool = {"type": "function", "name": "f", "function": {"name": "f"}, "parameters": {"x": DEEP}}
    for value in (
        DEEP,
        {"x": DEEP},
        {**tool, "x": DEEP},
        [tool],
        [{"type": "message", "role": "user", "content": DEEP}],
    ):
        body = BASE[endpoint] | {name: value}
        assert answered(server, endpoint, body)[0] == answered(server, endpoint, body | {"stream": True})[0]


def test_policies_that_need_torch_are_refused_without_it(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(self: Any, entry: Any) -> None:
        raise AssertionError(f"{entry.name} is imported")

    monkeypatch.setattr(Registry, "_load", loads)
    for name in (*POLICIES.entry_points(), "full", "sink", "nothing"):
        if name not in POLICIES.registered or name == "full":
            status, answer = server.ask("Hi.", policy=name)
            assert (status, answer["error"]["param"]) == (400, "policy"), name
    assert server.ask("Hi.", policy="recent")[0] == 200


TURN = st.fixed_dictionaries({
    "text": st.sampled_from(["Hi.", "Tell me.", "日本 <tool_call> x", "<|im_end|"]),
    "stream": st.booleans(),
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function", "function": {"name": "weather"}}]),
    "stop": st.sampled_from([None, "e", [" a", "s", "o"]]),
    "max_tokens": st.sampled_from([1, 7, 40]),
    "parallel_tool_calls": st.booleans(),
    "seed": st.integers(0, 99),
})  # fmt: skip


@settings(max_examples=settings.default.max_examples // 5)
@given(st.lists(TURN, min_size=2, max_size=4))
def test_conversations_go_on(server: Running, turns: list[dict[str, Any]]) -> None:
    """What a client has seen and sends back is the history that the server knows."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"Be brief. {turns[0]['seed']}"}]
    for number, turn in enumerate(turns):
        more = {name: value for name, value in turn.items() if name != "text"}
        if messages[-1]["role"] != "tool":
            messages.append({"role": "user", "content": f"{turn['text']} {number}"})
        body = {"messages": messages, "tools": [STRICT, TIME], "temperature": 1, **more}
        status, answer = answered(server, "chat/completions", body)
        assert status == 200, answer
        message, report = message_of(answer, turn["stream"])
        if number:
            assert (report["origin"], report["turns_known"]) == ("continued", number), messages
        if not message["content"] and not message.get("tool_calls"):
            return  # a client has nothing to send back
        messages.append(message)
        results = ({"role": "tool", "tool_call_id": call["id"]} for call in message.get("tool_calls", ()))
        messages += [{**result, "content": "18 degrees"} for result in results]
