"""How long a model thinks, and what is asked of single tokens: budgets, efforts, biases and shortest replies."""

import copy
import json
from typing import Any

import numpy
import pytest
from transformers import PreTrainedTokenizerBase

from h2o_stream import CacheConfig, Conversation, Engine, SamplingConfig
from h2o_stream.engine.grammar import Grammar
from h2o_stream.engine.sampling import Sampler
from h2o_stream.serve.errors import ApiError
from h2o_stream.serve.requests import Options, parse_bias
from h2o_stream.serve.thinking import parse_budget
from h2o_stream.session.messages import parse_tools
from h2o_stream.session.template import ChatTemplate
from h2o_stream.session.thinking import Markers
from h2o_stream.session.turn import Turn
from tests.fixtures import make_llama
from tests.in_turn import in_turn
from tests.test_tools import HERMES
from tests.thinking_model import OPENED, thinking_tokenizer

SCHEMA = {"enum": ["yes", "no"]}


@in_turn("budget, message, schema", [(4, "Enough.", None), (0, "", None), (3, "", SCHEMA)])
def test_thinking_ends_at_its_budget(
    tokenizer: PreTrainedTokenizerBase, budget: int, message: str, schema: Any
) -> None:
    """A random model would think until the end."""
    talking = thinking_tokenizer(tokenizer, OPENED, special=True)
    sampling = SamplingConfig(0, max_tokens=20, thinking_budget=budget, thinking_message=message)
    model = make_llama(vocab=len(talking), context=800)
    with Engine(model, talking, CacheConfig(window=64), sampling) as engine:
        conversation = Conversation(engine)
        conversation.follow(schema)
        for _ in range(2):
            *_, turn = conversation.say("Hi")
            assert isinstance(turn, Turn)
            ending = len(conversation.metadata.template.thinking_end(message))
            assert budget <= turn.thinking_tokens <= budget + ending
            assert turn.thinking.endswith(message)
            assert turn.text
            if schema:
                assert json.loads(turn.text) in schema["enum"]


def test_channels_end_with_what_begins_the_answer() -> None:
    harmony = Markers(
        "<|channel|>analysis<|message|>", "<|end|>", ("<|start|>assistant", "<|channel|>final<|message|>")
    )
    assert harmony.ended("") == "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert Markers("<think>", "</think>").ended("Done.") == "Done.\n</think>\n\n"


EFFORTS = "{{ 'effort: ' + (reasoning_effort or 'none given') + '\n' }}" + HERMES


def test_efforts_are_handed_to_templates_that_use_them(tokenizer: PreTrainedTokenizerBase) -> None:
    changed = copy.copy(tokenizer)
    changed.chat_template = EFFORTS
    for effort in ("low", "high"):
        template = ChatTemplate(changed, None, (), effort=effort)
        assert changed.decode(template.first_turn("Hi").tokens).startswith(f"effort: {effort}\n")
    plain, other = Options(CacheConfig(window=64)), Options(CacheConfig(window=64), has_efforts=True)
    for body, effort in [
        ({"reasoning_effort": "minimal"}, "low"), ({"reasoning": {"effort": "medium"}}, "medium"),
        ({"think": "high"}, "high"), ({"chat_template_kwargs": {"reasoning_effort": "xhigh"}}, "high"),
        ({"reasoning_effort": "none"}, None), ({}, None),
    ]:  # fmt: skip
        assert other.parse(body, "").effort == effort
        assert plain.parse(body, "").effort is None
    assert other.parse({"think": "low"}, "").key != other.parse({"think": "high"}, "").key
    with pytest.raises(ApiError, match="the same in all of them"):
        other.parse({"think": "low", "reasoning_effort": "high"}, "")


@in_turn("body, budget", [
    ({}, None), ({"thinking_budget_tokens": -1}, None), ({"thinking_budget_tokens": 0}, 0),
    ({"chat_template_kwargs": {"thinking_budget": 512}}, 512),
    ({"chat_template_kwargs": {"thinking_budget": 5}, "thinking_budget_tokens": 5}, 5),
    ({"thinking_budget_tokens": -2}, ApiError), ({"thinking_budget_tokens": True}, ApiError),
    ({"chat_template_kwargs": {"thinking_budget": 5}, "thinking_budget_tokens": 6}, ApiError),
])  # fmt: skip
def test_budgets_of_requests(body: Any, budget: Any) -> None:
    if budget is ApiError:
        with pytest.raises(ApiError):
            parse_budget(body)
    else:
        assert parse_budget(body) == budget


def test_biases_and_shortest_replies(tokenizer: PreTrainedTokenizerBase) -> None:
    scores = numpy.array([3.0, 2.0, 1.0, 0.0], numpy.float32)
    sampler = Sampler(SamplingConfig(0, min_tokens=2, logit_bias=((1, -5.0), (3, 2.5))), None)
    sampler.end_tokens = [0]
    assert [sampler.sample(scores, reply) for reply in ([], [3], [3, 3])] == [3, 3, 0]
    ends = {tokenizer.eos_token_id}
    short = Sampler(SamplingConfig(0, min_tokens=9), None)
    short.end_tokens = [*ends]
    matcher = Grammar(tokenizer, ends, len(tokenizer), SCHEMA).matcher()
    reply = list[int]()
    while not ends & {*reply}:  # the grammar ends it all the same
        reply.append(short.sample(numpy.zeros(len(tokenizer), numpy.float32), reply, matcher.masked))
        matcher.accept(reply[-1])
    assert json.loads(tokenizer.decode(reply[:-1])) in SCHEMA["enum"]


PAIR = {
    "type": "object", "properties": {"a": {"const": 1}, "b": {"const": [2]}}, "required": ["a", "b"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize("schema", [PAIR, {"$ref": "#/$defs/pair", "$defs": {"pair": PAIR}}])
def test_space_in_json_has_an_end(tokenizer: PreTrainedTokenizerBase, schema: dict[str, Any]) -> None:
    """Regression: a real model that wanted to end an object before its last property wrote space up to max_tokens."""
    ends, size = {tokenizer.eos_token_id}, len(tokenizer)
    spaces = numpy.array([tokenizer.decode([token]).isspace() for token in range(size)], numpy.float32)
    matcher, reply = Grammar(tokenizer, ends, size, schema).matcher(), list[int]()
    while not ends & {*reply}:
        reply.append(int(matcher.masked(spaces).argmax()))
        matcher.accept(reply[-1])
        assert len(reply) < 500
    assert json.loads(tokenizer.decode(reply[:-1])) == {"a": 1, "b": [2]}


@in_turn("value, biases", [
    ({"5": 1, "7": -100}, {5: 1.0, 7: -100.0}), ([[5, 1.5], [6, False]], {5: 1.5, 6: -1e6}), ({}, {}), (None, {}),
    ([["5", 1]], {"5": 1.0}), ({"the": 2}, {"the": 2.0}), ({"5": True}, None), ({"-5": "x"}, None),
    ({"99999": 1}, None), ([[True, 1]], None), ([[5]], None), ([5], None), (5, None),
    ({"5": 1e9}, None), ({"": 1}, None),
])  # fmt: skip
def test_biases_of_requests(tokenizer: PreTrainedTokenizerBase, value: Any, biases: Any) -> None:
    if biases is None:
        with pytest.raises(ApiError, match="logit_bias is"):
            parse_bias(value, tokenizer, len(tokenizer))
        return
    expected = dict[int, float]()
    for name, bias in biases.items():
        tokens = [name] if isinstance(name, int) else tokenizer(name, add_special_tokens=False)["input_ids"]
        expected |= dict.fromkeys(tokens, bias)
    assert dict(parse_bias(value, tokenizer, len(tokenizer))) == expected


NAMING = HERMES.replace("{{ tool | tojson }}", "<{{ tool.function.name }}>").replace(
    '{"name": "{{ call.function.name }}"', "<{{ call.function.name }}>"
)


@in_turn("part", ["x<|im_end|", "<|im_start|", "|>", "im_end|>x", "<", ">", "<|im_end"])
def test_parts_of_control_tokens_stay_text(tokenizer: PreTrainedTokenizerBase, part: str) -> None:
    """At the edge of a text, a template's next character could make one of them: they are counted in the whole."""
    changed = copy.copy(tokenizer)
    changed.chat_template = NAMING.replace("{{ message.content }}", "{{ '<|im_end' + message.content + '>' }}")
    controls = set(changed.backend_tokenizer.get_added_tokens_decoder())

    def fed(text: str) -> list[int]:
        tools = parse_tools([{"type": "function", "function": {"name": text, "description": text}}])
        template = ChatTemplate(changed, text, (), tools=tools)
        call = {"role": "assistant", "content": text, "tool_calls": [{"function": {"name": text, "arguments": {}}}]}
        turn = [{"role": "user", "content": text}, call, {"role": "tool", "content": text, "name": text}]
        return [token for token in template.first_turn(turn).tokens if token in controls]

    assert fed(part) == fed("plain")
