"""The server on a random model: the real client package, histories, branches, sleep, errors, disconnects."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from h2o_stream.engine.speculation import Speculation
from h2o_stream.native.lookahead import Lookahead
from h2o_stream.serve.errors import ApiError
from h2o_stream.serve.messages import chain, first_hash, parse_dialogue
from h2o_stream.serve.stream import WaitingEngine
from tests.native_builds import needs_library
from tests.protocol import answered
from tests.serve_load import converse, post, texts, together
from tests.served import Running, reply

JSON = {"Content-Type": "application/json"}

pytestmark = needs_library


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, long_folder: Path) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("served"), long_folder) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    return server.client()


class TestMessages:
    def test_turns(self) -> None:
        roles = ("system", "developer", "user", "user", "assistant", "user")
        dialogue = parse_dialogue([{"role": role, "content": f"{n}"} for n, role in enumerate(roles)])
        assert (dialogue.system, dialogue.user) == ("0\n\n1", "5")
        assert [(exchange.user, exchange.reply.text) for exchange in dialogue.past] == [("2\n\n3", "4")]

    @pytest.mark.parametrize(("messages", "place"), [
        ([], "messages"), ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "assistant", "content": "x"}], "messages"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": 3}], "messages[1].content"),
        ([{"role": "user", "content": " "}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
    ])  # fmt: skip
    def test_wrong(self, messages: Any, place: str) -> None:
        with pytest.raises(ApiError) as refused:
            parse_dialogue(messages)
        assert (refused.value.status, refused.value.param) == (400, place)

    def test_hashes(self) -> None:
        def hashes(system: str | None, *texts: str) -> list[str]:
            roles = ("user", "assistant")
            dialogue = parse_dialogue([{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)])
            return chain(first_hash([], system), dialogue.past)

        one, two = hashes(None, "a", "b", "c", "d", "e"), hashes(None, "a", "b ", "c", "x", "e")
        assert one[:2] == two[:2]
        assert one[2] != two[2]
        assert not {*one} & {*hashes("s", "a", "b", "c", "d", "e")}


class TestConversations:
    def test_a_history_that_is_sent_again_is_continued(self, server: Running) -> None:
        first = server.say("Name a river.")
        second = server.say("Name a river.", reply(first), "And a lake.")
        report = second["h2o"]
        assert (report["origin"], report["conversation"], report["turn"]) == (
            "continued",
            first["h2o"]["conversation"],
            2,
        )
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == first["h2o"]["seen_tokens"]

    def test_another_end_is_a_branch_that_leaves_the_first_as_it_is(self, server: Running) -> None:
        first = reply(server.say("Name a tree."))
        one = server.say("Name a tree.", first, "Is it tall?")
        other = server.say("Name a tree.", first, "Is it old?")
        again = server.say("Name a tree.", first, "Is it tall?")
        assert [answer["h2o"]["origin"] for answer in (one, other, again)] == ["continued", "branched", "branched"]
        assert reply(again) == reply(one)
        assert server.say("Name a tree.", first, "Is it tall?", reply(one), "Sure?")["h2o"]["origin"] == "continued"

    def test_an_unknown_history_is_read_from_where_it_is_unknown(self, server: Running) -> None:
        first = reply(server.say("Name a bird."))
        report = server.say("Name a bird.", first, "Another.", "A duck, I said.", "One more.")["h2o"]
        assert (report["origin"], report["turns_known"], report["turns_read"]) == ("continued", 1, 1)
        report = server.say("Never said.", "Nor this.", "Hello.")["h2o"]
        assert (report["origin"], report["turns_known"], report["turns_read"]) == ("read", 0, 1)

    def test_a_chat_goes_on_by_the_id_of_an_answer(self, server: Running) -> None:
        """Only what is new is sent; the same as if everything was sent again."""
        first = server.say("Name a river.")
        whole = server.say("Name a river.", reply(first), "And a lake.", store=False)
        second = server.say("And a lake.", previous_response_id=first["id"])
        assert (reply(second), second["h2o"]["origin"]) == (reply(whole), "continued")
        again = server.say("And a lake.", previous_response_id=first["id"])
        assert (reply(again), again["h2o"]["origin"]) == (reply(whole), "branched")
        status, answer = server.ask("And a lake.", previous_response_id=first["id"] + "0")
        assert (status, answer["error"]["code"]) == (404, "not_found")
        status, answer = server.ask("One.", "Two.", "Three.", previous_response_id=second["id"])
        assert (status, answer["error"]["param"]) == (400, "messages")

    def test_a_branch_reads_again_what_its_conversation_does(self, server: Running) -> None:
        """Also if it is not kept."""
        asked = {"recall": "auto", "window": 64, "max_tokens": 1}
        history = ["The code of the cellar é is 4711."]
        for text in ("Hi. 1", "Hi. 2", "Hi. 3", "What is the code of the cellar é?"):
            history += [reply(server.say(*history, **asked)), text]
        answers = [server.say(*history, **asked, store=keep)["h2o"] for keep in (False, True, True)]
        assert [answer["origin"] for answer in answers] == ["branched", "continued", "branched"]
        assert len({answer["seen_tokens"] for answer in answers}) == 1
        read = server.say(*history, **asked | {"recall": "off"})["h2o"]
        assert answers[0]["seen_tokens"] > read["seen_tokens"]

    def test_together_as_alone(self, server: Running) -> None:
        alone = [texts(converse(server.url, number, 2, 10)) for number in range(2)]
        answers, _ = together(server.url, range(4), 2, 10)
        assert [texts(talk) for talk in answers[:2]] == alone
        assert len({json.dumps(texts(talk)) for talk in answers}) == 4

    def test_prompts_of_any_lengths_are_read_together(self, server: Running) -> None:
        """Also one of a single token, which has no stream yet to be stepped."""
        prompts = ["One", "One two three.", "word " * 70, "Read this: " + "a b c d " * 20]

        def ask(prompt: str) -> str:
            body = {"prompt": prompt, "temperature": 0, "max_tokens": 6}
            status, answer = post(server.url, "/v1/completions", body)
            assert status == 200, answer
            return str(answer["choices"][0]["text"])

        alone = [ask(prompt) for prompt in prompts]
        with ThreadPoolExecutor(10) as executor:
            assert list(executor.map(ask, prompts)) == alone

    def test_guesses_change_no_reply(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also if others come while there are some in the slots."""
        prompts = ["one two three " * (20 + number) for number in range(4)]
        taken = list[int]()

        def ask(prompt: str) -> Any:
            body = {"prompt": prompt, "temperature": 0, "max_tokens": 24, "logprobs": 1}
            return post(server.url, "/v1/completions", body)[1]["choices"]

        def take(lookahead: Lookahead, token: int, guesses: Sequence[int]) -> Any:
            taken.append(len(guesses))
            return real(lookahead, token, guesses)

        real = Lookahead.take
        with monkeypatch.context() as patch:
            patch.setattr(WaitingEngine, "can_guess", False)
            wanted = [ask(prompt) for prompt in prompts]
        monkeypatch.setattr(Speculation, "_count", lambda _, most: most)
        monkeypatch.setattr(Lookahead, "take", take)
        assert [ask(prompt) for prompt in prompts] == wanted
        assert taken
        with ThreadPoolExecutor(4) as executor:
            answers = list(executor.map(ask, prompts))  # whose logits are rounded otherwise
        assert [choices[0]["text"] for choices in answers] == [choices[0]["text"] for choices in wanted]

    @pytest.mark.parametrize("step", ["step", "_begun", "step_alone"])
    def test_a_step_that_fails_ends_its_replies_and_no_others(
        self, server: Running, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        def fail(*_: Any) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(WaitingEngine, "can_guess", step == "step_alone")
            patch.setattr(WaitingEngine if step == "step_alone" else server.service.worker._batch, step, fail)
            assert server.ask(f"Name a {step}.")[0] == 500
        assert server.ask(f"Name a {step}.")[0] == 200

    def test_a_token_that_cannot_be_fed_ends_its_reply_only(
        self, server: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begin, failed = WaitingEngine.begin_waiting, set[WaitingEngine]()

        def fail_once(engine: WaitingEngine) -> Any:
            if not failed and len([job for job in server.service.worker._jobs if job.live.engine.steps]) >= 2:
                failed.add(engine)
                engine.waiting = [-1]
            return begin(engine)

        monkeypatch.setattr(WaitingEngine, "begin_waiting", fail_once)
        with ThreadPoolExecutor(3) as executor:
            answers = list(executor.map(lambda number: server.ask(f"Name {number} tools.", max_tokens=64), range(3)))
        assert failed
        assert sorted(status for status, _ in answers) == [200, 200, 400]
        assert "these tokens cannot be fed" in str(answers)

    def test_choices(self, server: Running) -> None:
        answer = server.say("Say something.", n=3, temperature=1.5, seed=1)
        said = [choice["message"]["content"] for choice in answer["choices"]]
        assert len({*said}) == 3
        again = server.say("Say something.", n=3, temperature=1.5, seed=1)
        assert [choice["message"]["content"] for choice in again["choices"]] == said

    def test_options(self, server: Running) -> None:
        pinned = server.say("Which code?", pins=["The code is 4711."], window=48, policy="sink", recall="auto")
        assert pinned["h2o"]["seen_tokens"] > server.say("Which code?")["h2o"]["seen_tokens"] + 8


class TestClient:
    """The openai package."""

    def test_chat(self, client: Any) -> None:
        answer = client.chat.completions.create(
            model="smollm2-135m", messages=[{"role": "user", "content": "Count to ten."}], max_tokens=5,
            temperature=0, logprobs=True, top_logprobs=2,
        )  # fmt: skip
        report = answer.choices[0].logprobs.content
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens, len(report)) == ("length", 5, 5)
        assert all(x.token == x.top_logprobs[0].token and x.logprob <= 0 for x in report)

    def test_stream(self, client: Any) -> None:
        asked = {"model": "h2o", "messages": [{"role": "user", "content": "Count to six."}], "max_tokens": 12}
        whole = client.chat.completions.create(**asked, temperature=0).choices[0].message.content
        chunks = [*client.chat.completions.create(
            **asked, temperature=0, stream=True, stream_options={"include_usage": True}
        )]  # fmt: skip
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(pieces) == whole
        assert len([piece for piece in pieces if piece]) > 4
        assert chunks[-1].usage.completion_tokens == 12

    def test_stop(self, client: Any) -> None:
        asked = {"model": "h2o", "messages": [{"role": "user", "content": "Count to six."}], "temperature": 0}
        whole = client.chat.completions.create(**asked, max_tokens=12).choices[0].message.content
        word = whole.split()[2]
        cut = client.chat.completions.create(**asked, max_tokens=12, stop=[word]).choices[0]
        assert (cut.message.content, cut.finish_reason) == (whole[: whole.index(word)], "stop")

    def test_responses(self, client: Any) -> None:
        more = {"model": "h2o", "max_output_tokens": 6, "temperature": 0}
        first = client.responses.create(input="Name a river.", **more)
        second = client.responses.create(input="Another.", previous_response_id=first.id, **more)
        assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens
        branch = client.responses.create(input="Another.", previous_response_id=first.id, **more)
        assert branch.output_text == second.output_text
        events = [*client.responses.create(input="Another.", previous_response_id=first.id, stream=True, **more)]
        assert "".join(x.delta for x in events if x.type == "response.output_text.delta") == second.output_text
        assert events[0].response.id == events[-1].response.id
        with pytest.raises(openai.NotFoundError):
            client.responses.create(input="x", previous_response_id=f"resp_{'0' * 32}_1", **more)

    def test_completions(self, client: Any) -> None:
        answer = client.completions.create(
            model="h2o", prompt="One, two, three,", max_tokens=4, temperature=0, logprobs=1
        )
        assert "".join(answer.choices[0].logprobs.tokens).startswith(answer.choices[0].text)

    def test_json_schema(self, client: Any) -> None:
        shape = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["yes", "no"]}}}
        answer = client.chat.completions.create(
            model="h2o", messages=[{"role": "user", "content": "Say no."}], temperature=1, seed=3, max_tokens=60,
            response_format=shape,
        )  # fmt: skip
        assert json.loads(answer.choices[0].message.content) in ("yes", "no")

    def test_json_object(self, client: Any) -> None:
        ask = {"model": "h2o", "messages": [{"role": "user", "content": "Go."}], "max_tokens": 16, "temperature": 0.5}
        answer = client.chat.completions.create(**ask, response_format={"type": "json_object"})
        assert answer.choices[0].message.content.startswith("{")
        for wrong in ({"type": "yaml"}, {"type": "json_schema", "json_schema": {"name": "x"}},
                      {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}):  # fmt: skip
            with pytest.raises(openai.BadRequestError, match="response_format|JSON schema"):
                client.chat.completions.create(**ask, response_format=wrong)

    def test_models(self, client: Any, long_folder: Path) -> None:
        assert [model.id for model in client.models.list()] == [long_folder.name]


class TestPage:
    def test_slots_are_sent_after_each_token(self, server: Running) -> None:
        with server.connect() as connection:
            connection.request("GET", "/")
            assert b'id="slots"' in connection.getresponse().read()
        asked = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 3, "temperature": 0, "stream": True}
        body = {**asked, "stream_options": {"include_slots": True}}
        events = answered(server, "chat/completions", body)[1]
        slots = [event["h2o"]["slots"] for event in events if "h2o" in event]
        assert [x["seen"] - slots[0]["seen"] for x in slots] == [0, 1, 2, 2]
        assert all(sum(x[name] for name in ("sinks", "pinned", "heavy", "recent", "free")) == 64 for x in slots)
