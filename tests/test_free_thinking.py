"""Where replies follow rules, thinking before them is free."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from h2o_stream import CacheConfig, Conversation, Engine, SamplingConfig
from h2o_stream.engine.grammar import Grammar
from h2o_stream.serve.errors import ApiError
from h2o_stream.serve.thinking import parse_thinking
from h2o_stream.session.template import ChatTemplate
from h2o_stream.session.thinking import Markers
from h2o_stream.session.turn import Turn
from tests.fixtures import make_llama
from tests.serve_load import post
from tests.served import Running, serving
from tests.test_thinking import FORMS
from tests.thinking_model import OPENED, SWITCHED, thinking_tokenizer

SCHEMA = {"enum": ["{yes}", "no"]}
YES = '"{yes}"'
CALL = '%llguidance {}\nstart: "yes: " %json {"type": "integer"}\n'
THOUGHT = "So {: <x> it is\n\n"
CHANNELS = Markers(
    "<|channel|>analysis<|message|>", "<|end|>", ("<|start|>assistant", "<|channel|>final<|message|>")
)  # fmt: skip
ANSWERED = Markers("<think>", "</think>", ("<answer>",), "</answer>")


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerBase:
    """A tokenizer of bytes."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|im_start|>", "<|im_end|>"]
    backend = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>")


WRITTEN = {
    "<think>%s</think>\n\n{}": FORMS["Qwen 3.5"].markers,
    "<think>\n%s</think>\n<answer>\n{}\n</answer>": ANSWERED,
    "<answer>{}</answer>": ANSWERED,
    "<|channel|>analysis<|message|>%s<|end|><|start|>assistant<|channel|>final<|message|>{}": CHANNELS,
    "<|channel|>final<|message|>{}": CHANNELS,
    "<|channel>thought\n%s<channel|>{}": Markers("<|channel>thought", "<channel|>"),
    "<seed:think>%s</seed:think>{}": FORMS["Seed-OSS"].markers,
    "[THINK]%s[/THINK]{}": Markers("[THINK]", "[/THINK]"),
    "{}": FORMS["Qwen 3.5"].markers,
}


def first_refused(tokenizer: Any, grammar: Grammar, text: str, thinking: bool = False) -> str | None:
    """What of a whole reply comes before the first token that the grammar refuses; None if it takes all of it."""
    matcher = grammar.matcher(thinking)
    tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    for place, token in enumerate(tokens):
        logits = numpy.zeros(len(tokenizer), numpy.float32)
        logits[token] = 1
        if matcher.masked(logits)[token] != 1:
            return str(tokenizer.decode(tokens[:place]))
        matcher.accept(token)
    return None


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", ["special", "added", "text"])
@pytest.mark.parametrize("reply", WRITTEN)
def test_form(reply: str, kind: str, letters: PreTrainedTokenizerBase) -> None:
    """Markers may be special tokens, other added ones, or text."""
    markers, talking = WRITTEN[reply], copy.deepcopy(letters)
    if kind != "text":
        parts = {part for marker in markers.all for part in marker.replace(">", ">\n").replace("]", "]\n").split("\n")}
        talking.add_tokens([part for part in parts if part[-1:] in (">", "]")], special_tokens=kind == "special")
    grammar = Grammar(talking, {talking.eos_token_id}, len(talking), SCHEMA, markers)
    before, _, after = reply.replace("%s", THOUGHT).partition("{}")
    assert first_refused(talking, grammar, f"{before}{YES}{after}") is None
    assert first_refused(talking, grammar, f'{before}"maybe"{after}') is not None
    assert first_refused(talking, grammar, f"{before}Yes.{after}") is not None
    if before.strip().startswith(markers.opening):
        assert first_refused(talking, grammar, before.strip()[: len(markers.opening) + len(THOUGHT)]) is not None
        begun = reply.strip().removeprefix(markers.opening).replace("%s", THOUGHT).replace("{}", YES)
        assert first_refused(talking, grammar, begun, thinking=True) is None
        assert first_refused(talking, grammar, YES, thinking=True) is not None
    called = Grammar(talking, {talking.eos_token_id}, len(talking), CALL, markers)
    assert first_refused(talking, called, f"{before}yes: 1{after}") is None
    assert first_refused(talking, called, f"{before}{YES}{after}") is not None
    strict = Grammar(talking, {talking.eos_token_id}, len(talking), SCHEMA)
    assert first_refused(talking, strict, YES) is None
    assert before == "" or first_refused(talking, strict, f"{before}{YES}{after}") == ""


def say_first(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, text: str) -> None:
    """Let every model want to say so, then to answer."""
    matcher, quote = Grammar.matcher, tokenizer('"')["input_ids"][0]

    def scripted(self: Grammar, thinking: bool = False) -> Any:
        made = matcher(self, thinking)
        tokens, masked = iter(tokenizer(text, add_special_tokens=False)["input_ids"]), made.masked

        def wanted(logits: Any) -> Any:
            logits = logits.copy()
            logits[quote] += 100
            logits[next(tokens, quote)] += 1000
            return masked(logits)

        monkeypatch.setattr(made, "masked", wanted)
        return made

    monkeypatch.setattr(Grammar, "matcher", scripted)


@pytest.mark.every(2)
@pytest.mark.parametrize(("template", "thinking", "said"), [
    (SWITCHED, None, f"<think>{THOUGHT}</think>\n"), (SWITCHED, False, f"<think>{THOUGHT}</think>\n"),
    (OPENED, None, f"{THOUGHT}</think>"), (OPENED, False, f"{THOUGHT}</think>"),
    (SWITCHED, None, f"<think>{THOUGHT}<|im_end|>"), (OPENED, None, f"{THOUGHT}<|im_end|>"),
])  # fmt: skip
def test_conversation(
    template: str, thinking: bool | None, said: str, letters: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a switch; a model that always thinks goes on to do so."""
    talking = thinking_tokenizer(letters, template, special=True)
    say_first(monkeypatch, talking, said)
    model = make_llama(vocab=len(talking), context=800)
    with Engine(model, talking, CacheConfig(window=64), SamplingConfig(0, max_tokens=60)) as engine:
        conversation = Conversation(engine, thinking=thinking)
        conversation.follow(SCHEMA)
        for _ in range(2):
            *_, turn = conversation.say("Hi")
            assert isinstance(turn, Turn)
            assert json.loads(turn.text) in SCHEMA["enum"]
            assert turn.thinking == ("" if template == SWITCHED and thinking is False else THOUGHT.strip())
            assert turn.finish == "stop"
        if template == SWITCHED:
            conversation.switch_thinking(not thinking if thinking is False else False)
            *_, last = conversation.say("Hi")
            assert isinstance(last, Turn)
            assert json.loads(last.text) in SCHEMA["enum"]
            assert last.thinking == (THOUGHT.strip() if thinking is False else "")


def test_a_model_that_does_not_think_answers(letters: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it would not begin with the answer either."""
    talking = thinking_tokenizer(letters, SWITCHED)
    say_first(monkeypatch, talking, "The answer")
    with Engine(
        make_llama(vocab=len(talking), context=800), talking, CacheConfig(window=64), SamplingConfig(0, max_tokens=60)
    ) as engine:
        conversation = Conversation(engine)
        conversation.follow(SCHEMA)
        *_, turn = conversation.say("Hi")
        assert isinstance(turn, Turn)
        assert (json.loads(turn.text) in SCHEMA["enum"], turn.thinking) == (True, "")
        conversation.follow(None)
        *_, turn = conversation.say("Hi")
        assert isinstance(turn, Turn)
        assert turn.text[:1] != '"'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, letters: PreTrainedTokenizerBase) -> Iterator[Running]:
    with serving(tmp_path_factory, thinking_tokenizer(letters, SWITCHED, special=True)) as running:
        yield running


SHAPE = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
OFF: list[dict[str, Any]] = [
    {"think": False}, {"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}},
    {"reasoning_effort": "none"}, {"chat_template_kwargs": {"thinking_budget": 0}},
    {"reasoning": {"effort": "none"}},
]  # fmt: skip


@pytest.mark.every(3)
@pytest.mark.parametrize("more", [{}, {"reasoning_effort": "high"}, {"enable_thinking": True}, *OFF])
def test_server(more: dict[str, Any], server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """By chat completions and by responses."""
    say_first(monkeypatch, server.service.model.tokenizer, f"<think>{THOUGHT}</think>\n")
    thought = None if more in OFF else THOUGHT.strip()
    answer = server.say("Hi", max_tokens=60, response_format=SHAPE, **more)["choices"][0]["message"]
    assert (json.loads(answer["content"]) in SCHEMA["enum"], answer.get("reasoning_content")) == (True, thought)
    asked = {"input": "Hi", "temperature": 0, "max_output_tokens": 60, "text": {"format": {**SHAPE, "schema": SCHEMA}}}
    status, response = post(server.url, "/v1/responses", {**asked, **more})
    assert status == 200, response
    kinds = {item["type"]: item["content"][0]["text"] for item in response["output"]}
    assert kinds.get("reasoning") == thought
    assert json.loads(kinds["message"]) in SCHEMA["enum"]


@pytest.mark.parametrize("body", [
    {"think": True, "enable_thinking": False}, {"enable_thinking": "no"}, {"reasoning_effort": "some"},
    {"chat_template_kwargs": {"date": "today"}}, {"chat_template_kwargs": 1}, {"reasoning": "none"},
    {"chat_template_kwargs": {"thinking_budget": True}}, {"enable_thinking": True, "reasoning_effort": "none"},
])  # fmt: skip
def test_wrong_fields(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=r"(is|are) .*accepted: "):
        parse_thinking(body, None)


def test_defaults() -> None:
    assert parse_thinking({}, True) is True
    assert parse_thinking({"reasoning_effort": "low", "think": None, "reasoning": None}, False) is False
    assert parse_thinking({"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "high"}}, None) is True


def test_every_switch_of_templates(letters: PreTrainedTokenizerBase) -> None:
    """What is switched off may not be begun."""
    for form in FORMS.values():
        talking = thinking_tokenizer(letters, form.template)
        begins = form.markers.unclosed(form.endings[2])
        for value in (None, True):
            assert ChatTemplate(talking, None, (), value).free_thinking == form.markers
        off = ChatTemplate(talking, None, (), False).free_thinking
        assert off == (form.markers if begins or not form.switch else None)
