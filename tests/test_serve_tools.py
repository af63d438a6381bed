"""Calls of tools: how models write them, and the server by the real client package."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from transformers import PreTrainedTokenizerBase

from h2o_stream.session.messages import parse_tools
from h2o_stream.session.template import ChatTemplate
from tests.in_turn import in_turn
from tests.native_builds import needs_library
from tests.served import Running, serving
from tests.test_serve_calls import CALLING, WARM
from tests.test_tools import HERMES, TIME, WEATHER


def calling(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """One whose template writes calls between tokens that are not flagged special, as in Qwen's files."""
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = HERMES
    changed.add_tokens(["<tool_call>", "</tool_call>"])
    return changed


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Iterator[Running]:
    with serving(tmp_path_factory, calling(tokenizer)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    return server.client()


STRICT = copy.deepcopy(WEATHER)
STRICT["function"]["parameters"] = {  # type: ignore[index]
    "type": "object", "properties": {"city": {"enum": ["Bern", "Genf"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
ASKED = {"model": "h2o", "tools": [STRICT, TIME], "temperature": 0, "max_tokens": 60}
NAMED_WEATHER = {"type": "function", "name": "weather"}
RESPONSE = {
    "model": "h2o", "tools": [{"type": "function", **tool["function"]} for tool in (STRICT, TIME)],
    "temperature": 0, "max_output_tokens": 60,
}  # fmt: skip


@needs_library
class TestServer:
    """A random model calls nothing by itself, but it can be made to."""

    def named(self, client: Any, messages: Any, **more: Any) -> Any:
        choice = {"type": "function", "function": {"name": "weather"}}
        return client.chat.completions.create(messages=messages, tool_choice=choice, **ASKED | more)

    def test_a_call_and_its_result(self, client: Any) -> None:
        first = self.named(client, [WARM])
        choice = first.choices[0]
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "weather")
        assert json.loads(call.function.arguments)["city"] in ("Bern", "Genf")
        result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
        messages = [WARM, choice.message, result]
        second = client.chat.completions.create(messages=messages, **ASKED | {"max_tokens": 6})
        assert (second.h2o["origin"], second.h2o["turns_known"]) == ("continued", 1)
        assert second.usage.prompt_tokens_details.cached_tokens == first.h2o["seen_tokens"]
        messages += [second.choices[0].message, {"role": "user", "content": "Sure?"}]
        third = client.chat.completions.create(messages=messages, **ASKED | {"max_tokens": 6})
        assert (third.h2o["origin"], third.h2o["turns_known"]) == ("continued", 2)

    def test_a_stream(self, client: Any) -> None:
        whole = self.named(client, [WARM]).choices[0].message.tool_calls[0].function
        chunks = [chunk.choices[0] for chunk in self.named(client, [WARM], stream=True)]
        (delta,) = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        assert (delta.index, delta.function.name, delta.function.arguments) == (0, whole.name, whole.arguments)
        assert not any(chunk.delta.content for chunk in chunks)
        assert chunks[-1].finish_reason == "tool_calls"

    def test_a_forced_reply_that_was_cut_off(self, client: Any) -> None:
        """After the call that was asked for it is complete; before that, half a call is no text."""
        tokens = self.named(client, [WARM]).usage.completion_tokens - 1  # without the one that ends it
        for limit, count, finish in ((tokens, 1, "tool_calls"), (8, 0, "length"), (1, 0, "length")):
            choice = self.named(client, [WARM], max_tokens=limit).choices[0]
            assert len(choice.message.tool_calls or ()) == count
            assert (choice.message.content, choice.finish_reason) == (None, finish)
            chunks = [chunk.choices[0] for chunk in self.named(client, [WARM], max_tokens=limit, stream=True)]
            assert chunks[-1].finish_reason == finish
            assert not any(chunk.delta.content for chunk in chunks)

    def test_required_calls_end(self, client: Any) -> None:
        """A random model goes on calling only as long as it would by itself, and never hands out half a call."""
        for stream in (False, True):
            asked = ASKED | {"max_tokens": 400, "tool_choice": "required", "stream": stream, "tools": [STRICT]}
            got = client.chat.completions.create(messages=[WARM], **asked)
            chunks = [chunk.choices[0] for chunk in got] if stream else [got.choices[0]]
            parts = [chunk.delta if stream else chunk.message for chunk in chunks]
            calls = [call.function for part in parts for call in part.tool_calls or ()]
            assert 1 <= len(calls) <= 8
            assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
            assert (chunks[-1].finish_reason, any(part.content for part in parts)) == ("tool_calls", False)

    def test_the_window_grows_for_tools(self, client: Any) -> None:
        """The two tools of the examples do not fit a window of 256: nothing is refused for it."""
        tools = [{**STRICT, "function": {**STRICT["function"], "description": "Word " * 100}}, TIME]
        for window, least in ((64, 32), (300, 150)):
            asked = ASKED | {"tools": tools, "max_tokens": 4, "extra_body": {"window": window}}
            slots = client.chat.completions.create(messages=[WARM], **asked).h2o["slots"]
            assert slots["window"] == window + slots["grown"] == slots["sinks"] + slots["pinned"] + least
            assert slots["grown"] > 0

    def test_an_unknown_history_with_calls_is_read(self, client: Any, server: Running) -> None:
        """As the template writes it: the same tokens as if it had been said."""
        asked = {"role": "user", "content": "Is it warm there?"}
        result = {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "18 degrees"}
        messages = [
            asked, CALLING, result, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Sure?"},
        ]  # fmt: skip
        read = client.chat.completions.create(messages=messages, **ASKED | {"max_tokens": 4})
        assert (read.h2o["origin"], read.h2o["turns_read"]) == ("read", 2)
        again = client.chat.completions.create(messages=messages[:3], **ASKED | {"max_tokens": 4})
        assert (again.h2o["origin"], again.h2o["turns_read"]) == ("read", 1)
        (entry,) = server.entries(again.h2o["conversation"], again.h2o["turn"])
        assert entry.prompt == 'Is it warm there?\nassistant: weather({"city": "Bern"})\ntool: 18 degrees'
        known = [*messages[:3], again.choices[0].message, {"role": "user", "content": "Sure?"}]
        assert client.chat.completions.create(messages=known, **ASKED | {"max_tokens": 4}).h2o["turns_known"] == 2

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_schema_is_for_replies_that_call_nothing(self, client: Any, stream: bool) -> None:
        """As agents ask for it: tools first, then an answer in a form."""
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        asked = ASKED | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
        for likely, calls in (("<tool_call>", True), ("{", False)):
            got = client.chat.completions.create(
                messages=[WARM], parallel_tool_calls=False, stream=stream, logit_bias={likely: 100}, **asked
            )
            chunks = [chunk.choices[0] for chunk in got] if stream else [got.choices[0]]
            parts = [chunk.delta if stream else chunk.message for chunk in chunks]
            called, text = [call for part in parts for call in part.tool_calls or ()], [part.content for part in parts]
            assert (len(called), chunks[-1].finish_reason == "tool_calls") == (calls, calls)
            if not calls:
                assert "".join(filter(None, text)).startswith("{")

    def test_a_choice_to_call_nothing_or_by_itself(self, client: Any) -> None:
        texts = [
            client.chat.completions.create(messages=[WARM], tool_choice=choice, **ASKED).choices[0].message
            for choice in ("none", "auto")
        ]
        assert [message.tool_calls for message in texts] == [None, None]
        assert texts[0].content == texts[1].content

    @in_turn("more, param", [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "web_search", "name": "x"}]}, "tools[0].type"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "none"}}}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"messages": [WARM, {"role": "tool", "content": "18"}]}, "messages[1].role"),
        ({"messages": [{**WARM, "tool_calls": CALLING["tool_calls"]}]}, "messages[0].tool_calls"),
        ({"messages": [WARM, {**CALLING, "tool_calls": [{}]}, WARM]}, "messages[1].tool_calls"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "nothing"}}}],
          "tool_choice": "required"}, "tools"),
    ])  # fmt: skip
    def test_wrong_requests(self, client: Any, more: dict[str, Any], param: str) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**{"messages": [WARM], **ASKED, **more})
        assert refused.value.param == param

    def test_responses(self, client: Any) -> None:
        """Calls and results are items there, with or without the id of the response before."""
        first = client.responses.create(input=WARM["content"], tool_choice=NAMED_WEATHER, **RESPONSE)
        (call,) = first.output
        chosen = self.named(client, [WARM]).choices[0].message.tool_calls[0].function
        assert (call.type, call.name, call.arguments) == ("function_call", chosen.name, chosen.arguments)
        assert (first.status, first.tools[0].name, first.tool_choice.name) == ("completed", "weather", "weather")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
        short = RESPONSE | {"max_output_tokens": 6}
        second = client.responses.create(input=[result], previous_response_id=first.id, **short)
        assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens
        whole = client.responses.create(input=[WARM, call, result], **short)
        assert (whole.output_text, whole.h2o["turns_known"]) == (second.output_text, 1)
        assert second.output_text
        with pytest.raises(openai.BadRequestError, match="must be those of the previous response"):
            client.responses.create(input=[result], previous_response_id=first.id, **short | {"tools": []})
        with pytest.raises(openai.BadRequestError, match="only after an assistant's message"):
            client.responses.create(input=[result], **short)

    def test_a_stream_of_a_response(self, client: Any) -> None:
        (expected,) = client.responses.create(input="Warm?", tool_choice=NAMED_WEATHER, **RESPONSE).output
        with client.responses.stream(input="Warm?", tool_choice=NAMED_WEATHER, **RESPONSE) as stream:
            events = [*stream]
            (call,) = stream.get_final_response().output
        assert (call.name, call.arguments) == (expected.name, expected.arguments)
        (delta,) = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert delta == expected.arguments
        assert not [event for event in events if event.type.startswith("response.output_text")]
        with client.responses.stream(input="Warm?", **RESPONSE | {"max_output_tokens": 6}) as stream:
            events = [*stream]
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert (events[-1].type, events[-1].response.output_text) == ("response.incomplete", text)
        assert text

    def test_a_model_without_tools(self, client: Any, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(vars(server.service), "call_format", None)
        with pytest.raises(openai.BadRequestError, match="has no tools") as refused:
            client.chat.completions.create(messages=[WARM], **ASKED)
        assert (refused.value.code, refused.value.param) == ("tools_not_supported", "tools")


def test_a_call_before_a_stop_string_stays_a_call(tokenizer: PreTrainedTokenizerBase) -> None:
    """Where a turn is read again, the marks of its calls are the tokens that the model wrote, and others are text."""
    changed = calling(tokenizer)
    opening, end = changed.convert_tokens_to_ids(["<tool_call>", "<|im_end|>"])
    template = ChatTemplate(changed, None, {end}, tools=parse_tools([WEATHER]))
    said = 'I ask. <tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call> <|im_end|> Well'
    own, told = template.reply(said, own=True), template.reply(said)
    assert (own.count(opening), own.count(end), told.count(opening)) == (1, 1, 0)
    assert changed.decode(own) == changed.decode(told) == f"{said}<|im_end|>"
