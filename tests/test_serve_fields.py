"""Every field in the table of the server is sent alone, with a value that would change the reply."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from h2o_stream.serve.chat import parse_chat
from h2o_stream.serve.completions import parse_completion
from h2o_stream.serve.errors import ApiError
from h2o_stream.serve.fields import ELSEWHERE, FIELDS, Endpoint, Ignored, Refused, Served, read_fields
from h2o_stream.serve.responses import parse_response
from h2o_stream.serve.wording import renamed
from tests.native_builds import needs_library
from tests.protocol import send
from tests.serve_load import post
from tests.served import Running, serving
from tests.test_tools import HERMES, WEATHER

pytestmark = needs_library

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
COMMON = {"temperature": 1, "seed": 7}
BASE: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "Say it."}], "max_tokens": 6, "store": False},
    "completions": {"prompt": "Say it.", "max_tokens": 6},
    "responses": {"input": [{"role": "user", "content": "Say it."}], "max_output_tokens": 6, "store": False},
}

CHANGES: dict[str, Any] = {
    "temperature": 0, "top_p": 0.1, "top_k": 1, "min_p": 1.0, "repetition_penalty": 9.0, "repeat_penalty": 9.0,
    "seed": 8, "stop": [" ", "e", "t", "a"], "stream": True, "json_schema": SCHEMA, "guided_json": SCHEMA,
    "grammar": 'root ::= "x" [0-9]', "guided_grammar": 'start: "x" /[0-9]/', "guided_regex": "x[0-9]",
    "guided_choice": ["x/1", "x/2"], "structured_outputs": {"regex": "x[0-9]"}, "format": SCHEMA,
    "options": {"num_predict": 2}, "pins": ["Keep this."], "max_tokens": 2, "n": 2, "n_cmpl": 2, "n_predict": 2,
    "num_predict": 2, "response_format": {"type": "json_object", "schema": SCHEMA},
    "messages.content": "Say another thing.", "prompt": ["Say it.", "Say it."], "tools": [WEATHER],
    "max_completion_tokens": 2, "input": "Say another thing.", "instructions": "Be brief.", "max_output_tokens": 2,
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    "min_tokens": 6, "ignore_eos": True, "logit_bias": {" the": 100},
    "text.format": {"type": "json_schema", "name": "x", "schema": SCHEMA}, "truncation": "auto", "metadata": {"a": "b"},
}  # fmt: skip
"""Values of served fields with which the answer differs."""

WRONG: dict[str, Any] = {
    "model": 3, "frequency_penalty": 3, "presence_penalty": 3, "repeat_last_n": -2, "dry_multiplier": -1,
    "dry_base": 0.5, "dry_allowed_length": -1, "stream_options": 3,
    "stream_options.include_usage": 3, "stream_options.include_slots": 3, "window": 0, "policy": "best",
    "recall": "all", "think": 3, "messages": [], "messages.role": "robot", "messages.tool_calls": [3],
    "top_logprobs": 2, "continue_final_message": True, "add_generation_prompt": False, "tool_choice": "required",
    "reasoning_budget_message": "x" * 2000, "parallel_tool_calls": 3, "store": 3, "logprobs": "x",
    "previous_response_id": "x",
}  # fmt: skip
"""Values of other served fields, which are refused: somebody reads them."""

SHOWN_ELSEWHERE = {"messages.tool_call_id", "enable_thinking", "chat_template_kwargs", "reasoning_effort", "reasoning",
                   "reasoning.effort", "thinking_budget_tokens", "thinking_token_budget",
                   "reasoning_budget_tokens"}  # fmt: skip
"""Fields whose effect needs a history, or a template that thinks: other tests show it."""

OTHERS: list[tuple[Any, str]] = [
    (True, "use_beam_search include_stop_str_in_output post_sampling_probs return_tokens return_token_ids "
           "return_tokens_as_token_ids enable_response_messages stream_options.continuous_usage_stats echo background "
           "reasoning_in_content reasoning_control add_special_tokens watermarking return_prompt_text "
           "_debug_render_only grammar_lazy"),
    (False, "skip_special_tokens penalize_nl penalize_newline include_reasoning parse_tool_calls"),
    (2, "best_of chat_format truncate_prompt_tokens prompt_logprobs dynatemp_range typical_p tfs_z top_n_sigma "
        "min_keep xtc_probability dry_penalty_last_n mirostat adaptive_target n_indent t_max_predict_ms n_keep "
        "num_keep n_discard n_probs top_logprobs n repetition_detection"),
    ([3], "stop_token_ids allowed_token_ids prompt_embeds images image_data context lora context_management "
          "messages.images documents functions tools logprob_token_ids previous_input_messages"),
    (["the"], "dry_sequence_breakers bad_words logits_processors samplers response_fields modalities include"),
    ({"a": 1}, "previous_response vllm_xargs moderation audio messages.audio function_call messages.function_call "
               "web_search_options access_programs image conversation prompt"),
    ("low", "chat_parser generation_prompt grammar_type messages.tool_name guided_whitespace_pattern "
            "structural_tag template system verbosity text.verbosity chat_template "
            "suffix reasoning_format"),
]  # fmt: skip
WRONG_VALUES = (-3, 10**9, 0.5, True, "x", "", [], [3], {}, {"a": 1}, float("inf"))
PARSERS: Any = {"chat/completions": parse_chat, "completions": parse_completion, "responses": parse_response}
REFUSED = {name: value for value, names in OTHERS for name in names.split()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Iterator[Running]:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = HERMES
    with serving(tmp_path_factory, changed) as running:
        yield running


def ask(server: Running, endpoint: str, name: str = "", value: Any = None) -> tuple[int, str]:
    """Status and answer, without what differs each time, to the base request with one more field."""
    body = copy.deepcopy(BASE[endpoint]) | COMMON
    outer, _, inner = inside(name)
    if name and not inner:
        body[name] = value
        if name in ("n_predict", "num_predict", "options", "max_completion_tokens"):
            body.pop("max_tokens", body.pop("max_output_tokens", None))
    elif outer == "messages":
        body["messages"][0][inner] = value
    elif inner:
        body[outer] = {inner: value}
    status, _, answer = send(server, endpoint, json.dumps(body).encode())
    return status, re.sub(r'"(id|created|created_at|item_id|nbytes)": ?("[^"]*"|\d+)', "", answer.decode())


def inside(name: str) -> tuple[str, str, str]:
    """The object of a field and its name in it; llama.cpp has names with a dot."""
    return (name, "", "") if name.startswith("speculative.") else name.partition(".")


def cases(kind: type) -> list[Any]:
    """The fields of a kind; those that several endpoints have alike, once."""
    found = {}
    for endpoint, fields in FIELDS.items():
        for name, rule in fields.items():
            if isinstance(rule, kind):
                found.setdefault((name, rule), endpoint)
    return [pytest.param(end, name, rule, id=f"{end} {name}") for (name, rule), end in found.items()]


@pytest.fixture(scope="module")
def plain(server: Running) -> dict[str, tuple[int, str]]:
    answers = {endpoint: ask(server, endpoint) for endpoint in FIELDS}
    assert all(status == 200 for status, _ in answers.values()), answers
    assert answers == {endpoint: ask(server, endpoint) for endpoint in FIELDS}, "the same request has the same answer"
    return answers


@pytest.mark.every(3)
@pytest.mark.parametrize(("endpoint", "name", "rule"), cases(Served))
def test_served(server: Running, plain: Any, endpoint: str, name: str, rule: Served) -> None:
    if name in CHANGES:
        status, answer = ask(server, endpoint, name, CHANGES[name])
        assert status == 200, answer
        assert answer != plain[endpoint][1]
    elif name not in SHOWN_ELSEWHERE:
        status, answer = ask(server, endpoint, name, WRONG[name])
        assert status in (400, 404), answer
        assert (rule.name or name).rpartition(".")[2] in answer


def is_left_out(endpoint: Any, name: str, value: Any) -> bool:
    """Whether nobody sees the field of a request; those inside others stay where they are, and nobody looks."""
    outer, _, inner = inside(name)
    body = {outer: [{inner: value}] if outer == "messages" else {inner: value}} if inner else {name: value}
    fields, unknown, _ = read_fields(body, endpoint)
    return not unknown and (bool(inner) or not fields)


@pytest.mark.parametrize(("endpoint", "name", "rule"), cases(Refused))
def test_refused(server: Running, plain: Any, endpoint: str, name: str, rule: Refused) -> None:
    value = REFUSED[name] if REFUSED[name] not in rule.neutral else not REFUSED[name]
    assert value not in rule.neutral
    status, answer = ask(server, endpoint, name, value)
    error = json.loads(answer)["error"]
    assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", name.replace("s.", "s[0].", 1)
                                                       if name.startswith("messages.") else name)  # fmt: skip
    assert error["message"].endswith(f"is not served: {rule.why}")
    for neutral in (None, *rule.neutral):
        assert is_left_out(endpoint, name, neutral)
        if isinstance(neutral, int) and not isinstance(neutral, bool):  # 1 equals true in Python
            with pytest.raises(ApiError):
                is_left_out(endpoint, name, bool(neutral))


@pytest.mark.every(4)
@pytest.mark.parametrize(("endpoint", "name", "rule"), cases(Ignored))
def test_without_influence(server: Running, plain: Any, endpoint: str, name: str, rule: Ignored) -> None:
    assert ask(server, endpoint, name, "low") == plain[endpoint]
    assert all(is_left_out(endpoint, name, value) for value in (3, True, {"a": "b"}, ["x"]))


@pytest.mark.parametrize("endpoint", FIELDS)
def test_errors_speak_of_fields(server: Running, endpoint: Any) -> None:
    """No value of a field is refused in the words of a command line, or of another field."""
    refused = set()
    for name, rule in FIELDS[endpoint].items():
        outer, _, inner = inside(name)
        for value in WRONG_VALUES if isinstance(rule, Served) else ():
            body = copy.deepcopy(BASE[endpoint])
            if rule.name:
                body.pop(rule.name, None)
            body |= (
                {outer: [{"role": "user", "content": "x", inner: value}] if outer == "messages" else {inner: value}}
                if inner
                else {name: value}
            )
            if error := refusal(server, endpoint, body):
                assert "--" not in str(error)
                assert re.sub(r"\[\d+\]", "", error.param or "").startswith(name), error.body()
                refused.add(name)
    assert {"temperature", "seed", "window", "repeat_penalty", "stream_options.include_usage"} <= refused


def refusal(server: Running, endpoint: Endpoint, body: dict[str, Any]) -> ApiError | None:
    """How a request is refused before it reaches the model."""
    names: Any = {}
    try:
        fields, _, names = read_fields(body, endpoint)
        PARSERS[endpoint](fields, server.service)
    except ApiError as error:
        return renamed(error, names)
    return None


@pytest.mark.parametrize(("endpoint", "fields", "message"), [
    ("chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens is 0; max_completion_tokens must be "),
    ("responses", {"n_predict": 0}, "n_predict is 0; n_predict must be at least 1"),
    ("completions", {"options": {"temperature": -1}}, "options.temperature is -1; options.temperature must be 0 "),
    ("completions", {"logprobs": 30}, "logprobs is 30; accepted: 0 to 20"),
    ("chat/completions", {"window": 10**6}, "window 1000000"),
    ("responses", {"input": [{"role": "robot", "content": "x"}]}, 'input.role is "robot"; accepted: system'),
])  # fmt: skip
def test_the_words_of_errors(server: Running, endpoint: Any, fields: Any, message: str) -> None:
    body = BASE[endpoint] | fields
    if set(fields) & {"max_completion_tokens", "n_predict"}:
        body = {name: value for name, value in body.items() if name not in ("max_tokens", "max_output_tokens")}
    status, answer = post(server.url, f"/v1/{endpoint}", body)
    assert status == 400
    assert answer["error"]["message"].startswith(message)


def test_names_that_nobody_documents_are_reported(server: Running) -> None:
    import urllib.request

    body = json.dumps({**BASE["chat/completions"], "no_such\nfield": 1, "stream_options": {"more": 1}}).encode()
    url, head = f"{server.url}/v1/chat/completions", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, head)) as answer:
        assert answer.headers["h2o-unknown-fields"] == "no_such\\nfield, stream_options.more"


def test_a_field_by_two_names(server: Running) -> None:
    status, answer = post(
        server.url, "/v1/completions", {**BASE["completions"], "repeat_penalty": 1.2, "repetition_penalty": 1.3}
    )
    assert (status, answer["error"]["param"]) == (400, "repeat_penalty")
    body = {**BASE["completions"], "options": {"num_predict": 1, "no_such": 1}}
    assert post(server.url, "/v1/completions", body)[1]["usage"]["completion_tokens"] == 6
    status, answer = post(server.url, "/v1/completions", {**body, "grammar": 'root ::= "x"', "guided_regex": "x"})
    assert (status, answer["error"]["param"]) == (400, "guided_regex")


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_elsewhere_is_refused_in_a_sentence(server: Running, name: str) -> None:
    status, answer = post(server.url, f"/v1/{name}" if name != "api" else "/api/chat", {})
    assert status == 404
    assert ELSEWHERE[name] in answer["error"]["message"]


@pytest.mark.parametrize("endpoint", FIELDS)
def test_the_table_has_every_field_of_openai(endpoint: Endpoint) -> None:
    """The package says what requests may have, and messages."""
    import typing

    from openai.types import chat, completion_create_params, responses

    bases: dict[str, Any] = {
        "chat/completions": chat.completion_create_params.CompletionCreateParamsBase,
        "completions": completion_create_params.CompletionCreateParamsBase,
        "responses": responses.response_create_params.ResponseCreateParamsBase,
    }
    names = {"stream", *typing.get_type_hints(bases[endpoint])}
    if endpoint == "chat/completions":
        for message in typing.get_args(chat.ChatCompletionMessageParam):
            names |= {f"messages.{name}" for name in typing.get_type_hints(message)}
    assert not names - FIELDS[endpoint].keys()


def as_markdown() -> str:
    """The table for the documentation: the fields that are served, by the endpoints that take them."""
    rows = dict[tuple[str, ...], list[str]]()
    for name in dict.fromkeys(name for table in FIELDS.values() for name in table):
        rules = {endpoint: rule for endpoint, table in FIELDS.items() if isinstance(rule := table.get(name), Served)}
        others = sorted({f"`{rule.name}`" for rule in rules.values() if rule.name})
        if rules:
            rows.setdefault(tuple(rules), []).append(f"`{name}`" + (f" ({' or '.join(others)})" if others else ""))
    lines = [
        f"| {'all' if len(endpoints) == len(FIELDS) else ', '.join(endpoints)} | {', '.join(names)} |"
        for endpoints, names in rows.items()
    ]
    return "\n".join(("| endpoints | fields |", "|---|---|", *lines))


def test_the_documentation_has_the_table() -> None:
    page = (Path(__file__).parents[1] / "docs" / "serving.md").read_text(encoding="utf-8")
    assert as_markdown() in page
