"""Conversations as other clients send them: any order of roles, any template, prefixes of replies, names of models."""

import copy
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from h2o_stream.models.loaded import short_name
from h2o_stream.models.templates import FALLBACK_TEMPLATE
from h2o_stream.serve import templates
from h2o_stream.serve.aside import LONG
from h2o_stream.serve.errors import ApiError
from h2o_stream.serve.messages import as_fed, parse_dialogue
from h2o_stream.serve.templates import Templates
from h2o_stream.session.template import ChatTemplate
from tests.native_builds import needs_library
from tests.serve_load import post
from tests.served import Running, reply
from tests.test_tools import HERMES

_LOOP = (
    "{% for m in messages %}CHECK{{ '<|im_start|>' + m.role + '\n' + (m.content | trim) + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_ALTERNATES = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
_NO_SYSTEM = "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
_FIRST = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
TEMPLATES = {
    "any": _LOOP.replace("CHECK", ""), "strict": _LOOP.replace("CHECK", _NO_SYSTEM + _ALTERNATES),
    "no system": _LOOP.replace("CHECK", _NO_SYSTEM), "system first": _LOOP.replace("CHECK", _FIRST),
    "omits system": "{{ '' }}" + _LOOP.replace("CHECK", "{% if m.role == 'system' %}{% continue %}{% endif %}"),
    "fallback": FALLBACK_TEMPLATE, "hermes": HERMES,
}  # fmt: skip
Messages = list[dict[str, str]]


def shapes() -> list[Messages]:
    """Conversations of random roles, each message with a word of its own."""
    draw = random.Random(7)
    return [
        [
            {"role": draw.choice(("system", "user", "user", "assistant")), "content": f"word{place}x"}
            for place in range(draw.randint(1, 8))
        ]
        for _ in range(60)
    ]


@pytest.mark.every(2)
@pytest.mark.parametrize("name", TEMPLATES)
def test_any_order_of_roles(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Every message is fed once, in its order, whatever the template rejects or omits."""
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = TEMPLATES[name]
    ends = {changed.convert_tokens_to_ids("<|im_end|>")}
    answered = 0
    for messages in shapes():
        try:
            dialogue = parse_dialogue(messages)
        except ApiError:
            roles = {message["role"] for message in messages if message["role"] != "system"}
            assert roles == {"assistant"}, messages
            continue
        template, tokens = ChatTemplate(changed, dialogue.system, ends), list[int]()
        for turn in as_fed(dialogue.past, dialogue.user):
            prompt = template.next_turn(turn.user, ended=True) if tokens else template.first_turn(turn.user)
            prompt = template.begin(prompt, dialogue.begun) if turn.reply is None and dialogue.begun else prompt
            tokens += [*prompt.tokens, *(template.reply(turn.reply) if turn.reply is not None else ())]
        text = changed.decode(tokens).lower()
        places = [text.find(message["content"]) for message in messages]
        assert -1 not in places, (messages, text)
        assert places == sorted(places), (messages, text)
        assert sum(text.count(message["content"]) for message in messages) == len(messages)
        answered += 1
    assert answered > 50


def test_what_stays_as_it_is(tokenizer: PreTrainedTokenizerBase) -> None:
    """A template that has room for a system message in the middle, and for a greeting, gets them."""
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = TEMPLATES["any"]
    template = ChatTemplate(changed, None, ())
    turn = [{"role": role, "content": role} for role in ("assistant", "system", "user")]
    rendered = "".join(f"<|im_start|>{role}\n{role}<|im_end|>\n" for role in ("assistant", "system", "user"))
    assert changed.decode(template.first_turn(turn).tokens) == f"{rendered}<|im_start|>assistant\n"


@pytest.mark.parametrize(("typed", "name"), [
    ("smollm2-135m", "smollm2-135m"), ("/models/qwen2.5-Q4_K_M.gguf", "qwen2.5-Q4_K_M"),
    ("big-00001-of-00003.gguf", "big"), ("org/repo:model-q4.gguf", "model-q4"), ("org/repo", "org/repo"),
    ("ollama:qwen2.5:0.5b", "qwen2.5:0.5b"), (f"{Path(__file__).parent}/", "tests"),
])  # fmt: skip
def test_names_of_models(typed: str, name: str) -> None:
    assert short_name(typed) == name


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("served")) as running:
        yield running


@needs_library
class TestServer:
    def test_the_last_message_of_an_assistant_is_continued(self, server: Running) -> None:
        begun = server.say("Count to nine.", "One, two,", max_tokens=6)
        assert reply(begun).strip().startswith("three")
        whole = f"One, two,{reply(begun)}"
        more = {"continue_final_message": True, "add_generation_prompt": False}
        assert reply(server.say("Count to nine.", "One, two,", max_tokens=6, **more)) == reply(begun)
        again = server.say("Count to nine.", whole, "And then?")
        assert (again["h2o"]["origin"], again["h2o"]["turns_known"]) == ("continued", 1)
        assert server.entries(again["h2o"]["conversation"], 1)[0].text == whole
        for wrong in ({"continue_final_message": False}, {"response_format": {"type": "json_object"}}):
            assert server.ask("Count to nine.", "One, two,", **wrong)[0] == 400

    def test_a_greeting_and_a_later_system_prompt_are_heard(self, server: Running) -> None:
        said = [{"role": "assistant", "content": "Hi! I am Rex, a dinosaur."},
                {"role": "user", "content": "What is your name?"}]  # fmt: skip
        body = {"messages": said, "temperature": 0, "max_tokens": 12}
        first = post(server.url, "/v1/chat/completions", body)[1]
        assert "Rex" in reply(first)
        more = [*said, {"role": "assistant", "content": reply(first)}, {"role": "user", "content": "Are you old?"}]
        second = post(server.url, "/v1/chat/completions", {**body, "messages": more})[1]
        assert second["h2o"]["origin"] == "continued"

    def test_any_model_is_served_and_logged(self, server: Running, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "h2o_stream"):
            answer = server.say("Hello.", model="gpt-4\n")
        assert answer["model"] == "smollm2-135m"
        (line,) = [record.getMessage() for record in caplog.records if "gpt-4" in record.getMessage()]
        assert line == r"a request names the model gpt-4\n; smollm2-135m answers"

    @pytest.mark.every(3)
    @pytest.mark.parametrize("endpoint", ["chat/completions", "responses"])
    @pytest.mark.parametrize("streamed", [False, True])
    def test_what_is_not_stored_is_not_on_disk(self, server: Running, endpoint: str, streamed: bool) -> None:
        word = f"4711zebra{endpoint[:4]}{streamed}"
        folder = server.service.store._folder
        kept = len([*folder.iterdir()])
        said = [{"role": "user", "content": f"The code is {word}. " * 4}]
        body = {"messages": said, "input": said, "max_tokens": 4, "max_output_tokens": 4, "stream": streamed}
        import json
        import urllib.request

        def send(**more: Any) -> None:
            data = json.dumps({**body, **more}).encode()
            head = {"Content-Type": "application/json"}
            urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/{endpoint}", data, head)).read()

        send(store=False)
        assert len([*folder.iterdir()]) == kept
        assert not [path for path in folder.rglob("*") if path.is_file() and word.encode() in path.read_bytes()]
        send()
        files = [path for path in folder.rglob("*") if path.is_file() and word.encode() in path.read_bytes()]
        assert files
        assert not [path for path in files if path.stat().st_mode & 0o077]

    def test_a_system_prompt_after_a_response_is_heard(self, server: Running) -> None:
        ask = {"max_output_tokens": 8, "temperature": 0, "instructions": "Be brief."}
        first = post(server.url, "/v1/responses", {**ask, "input": "Name a river."})[1]
        said = [{"role": "developer", "content": "Answer in French."}, {"role": "user", "content": "Name a lake."}]
        status, second = post(server.url, "/v1/responses", {**ask, "input": said, "previous_response_id": first["id"]})
        assert status == 200, second
        entry = server.entries(second["h2o"]["conversation"], 2)[1]
        assert entry.prompt == "system: Answer in French.\nName a lake."

    def test_a_response_after_one_that_is_stored_is_not(self, server: Running) -> None:
        def respond(text: str, **more: Any) -> Any:
            status, answer = post(server.url, "/v1/responses", {"input": text, "max_output_tokens": 4, **more})
            assert status == 200, answer
            return answer

        first = respond("Name a river.")
        second = respond("The code is 815okapi.", previous_response_id=first["id"], store=False)
        assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0
        folder = server.service.store._folder
        assert not [path for path in folder.rglob("*") if path.is_file() and b"815okapi" in path.read_bytes()]


@needs_library
def test_long_openings_are_kept_within_a_limit(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send one after another, also such as are refused. The newest one is about to be used."""
    made, options = Templates(server.service.model), server.service.options
    texts = [f"{number} " * LONG for number in range(4)]
    size = made.make(options, texts[0]).opening_size
    monkeypatch.setattr(templates, "_KEPT_TOKENS", 2 * size + 100)
    for text in texts:
        made.get(text, options, text)
    assert [*made._kept] == texts[2:]
    monkeypatch.setattr(templates, "_KEPT_TOKENS", size // 2)
    made.get(texts[0], options, texts[0])
    assert [*made._kept] == texts[:1]


def test_strict(tiny_folder: Path, tmp_path: Path) -> None:
    with Running(tmp_path, tiny_folder, strict=True) as running:
        assert running.ask("Hello.", model="gpt-4")[1]["error"]["code"] == "model_not_found"
        status, answer = running.ask("Hello.", no_such_field=1)
        assert (status, answer["error"]["param"]) == (400, "no_such_field")
        assert running.ask("Hello.", model=running.service.name)[0] == 200
