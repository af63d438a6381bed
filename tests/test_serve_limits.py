"""Limits of a server: sizes, memory, sleep, and what is left of clients that leave."""

import gc
import json
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from h2o_stream.serve.conversations import Conversations
from h2o_stream.session.conversation import Conversation
from tests import test_serve
from tests.native_builds import needs_library
from tests.serve_load import post
from tests.served import Running, reply
from tests.test_serve import JSON
from tests.waiting import wait_for

pytestmark = needs_library

server = test_serve.server


@pytest.fixture(params=["_MANY", "LARGE"])
def read(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> threading.Event:
    """Long conversations, which all are that have turns, or texts, wake up once this is set."""
    event, load = threading.Event(), Conversations.load
    monkeypatch.setattr(f"h2o_stream.serve.conversations.{request.param}", 1)
    monkeypatch.setattr(Conversations, "load", lambda *values: event.wait(30) and load(*values))
    return event


class TestLimits:
    def test_a_long_paste_is_read(self, server: Running) -> None:
        assert server.say("word " * 200)["h2o"]["seen_tokens"] > 200

    def test_a_size_is_refused_before_the_body_comes(self, server: Running) -> None:
        with server.connect(timeout_s=5) as connection:
            connection.putrequest("POST", "/v1/chat/completions")
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", str(10**12))
            connection.endheaders()
            assert connection.getresponse().status == 413

    @pytest.mark.parametrize("stream", [False, True])
    def test_what_never_fits_is_not_asked_for_again(self, tmp_path: Path, long_folder: Path, stream: bool) -> None:
        with Running(tmp_path, long_folder, running=1, waiting=1, awake=1) as running:
            assert running.ask("Two?", n=2, max_tokens=2)[0] == 200
            status, answer = running.ask("Three?", n=3, stream=stream)
            with running.connect() as other:
                body = {"messages": [{"role": "user", "content": "A story."}], "stream": True, "max_tokens": 2000}
                other.request("POST", "/v1/chat/completions", json.dumps(body | {"ignore_eos": True}), JSON)
                wait_for(lambda: running.service.active == 1)
                assert running.ask("Two more?", n=2, stream=stream)[0] == 429
        assert (status, answer["error"]["param"]) == (400, "n")
        assert "3 replies are asked for at once" in answer["error"]["message"]

    def test_long_requests_do_not_fill_the_memory(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        """Clients that send 4 MB each, by hundreds, had gigabytes."""
        monkeypatch.setattr(server.service, "body_bytes", 16 * server.service.config.max_body)
        status, answer = server.ask("a" * 20_000)
        assert (status, answer["error"]["code"]) == (503, "busy")
        assert server.ask("a" * 10)[0] == 200
        monkeypatch.undo()
        assert server.ask("a" * 20_000)[0] == 200
        assert server.service.body_bytes == 0

    def test_sleep_keys_sizes_and_metrics(self, tmp_path: Path, long_folder: Path) -> None:
        limits = {"awake": 2, "running": 2, "waiting": 0, "max_body": 2000}
        with Running(tmp_path, long_folder, api_key="secret", **limits) as running:
            say = partial(running.say, key="secret", max_tokens=4)
            assert running.ask("Hello.", key="wrong")[0] == 401
            assert running.ask("Hello.", key="secret", user="x" * 3000)[0] == 413
            assert running.ask("Hello.", key="secret", n=3)[0] == 400
            for number in range(5):
                say(f"Number {number}.")
            assert len(running.service.conversations.awake) <= 2
            first = say("Number 0.")
            answer = say("Number 0.", reply(first), "And?")
            assert answer["h2o"]["origin"] == "continued"
            more_usage = answer["usage"]
            with running.connect() as connection:
                connection.request("GET", "/metrics", headers={"Authorization": "Bearer secret"})
                lines = connection.getresponse().read().decode().splitlines()
            found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}
            assert found["h2o_awake_conversations"] == 2
            assert found["h2o_first_token_seconds_count"] == found["h2o_queue_seconds_count"] == 7
            assert 0 < found["h2o_first_token_seconds_sum"] < found["h2o_reply_seconds_sum"]
            assert found['h2o_tokens_total{kind="cached"}'] == more_usage["prompt_tokens_details"]["cached_tokens"] > 0
            assert found['h2o_tokens_total{kind="evicted"}'] == 0
            assert found["h2o_running_replies"] == found["h2o_waiting_replies"] == 0
            assert 0 < found["h2o_cache_bytes"] < 10**6 < found["process_resident_memory_bytes"]
            assert found["h2o_disk_bytes"] < found["h2o_disk_limit_bytes"]

    def test_caches_fit_into_memory(self, tmp_path: Path, long_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As many are awake as fit if they are full. What does not fit at all is refused."""
        with Running(tmp_path, long_folder) as running:
            conversations = running.service.conversations
            first = running.say("Number 0.")
            ((_, size),) = conversations.memory.sizes.values()
            monkeypatch.setattr(conversations.memory, "limit", 2.5 * size)
            for number in range(1, 4):
                running.say(f"Number {number}.")
            assert len(conversations.awake) == len(conversations.memory.sizes) == 2
            assert running.say("Number 0.", reply(first), "And?")["h2o"]["origin"] == "continued"
            status, answer = running.ask("Much?", window=8000)
            assert (status, answer["error"]["param"]) == (400, "window")
            with ThreadPoolExecutor(2) as executor:
                for number in range(2):
                    executor.submit(running.ask, f"A story, {number}.", max_tokens=2000, ignore_eos=True, store=False)
                wait_for(lambda: len(running.service.worker._jobs) == 2)
                assert not conversations.awake
                status, answer = running.ask("Room?")
                assert (status, answer["error"]["code"]) == (503, "busy")
            assert running.ask("Room?")[0] == 200
            assert len(running.service.store.conversations) == 5

    def test_what_caches_grow_by_counts(self, tmp_path: Path, long_folder: Path) -> None:
        """Their windows grow for system prompts and pins, which clients choose."""
        with Running(tmp_path, long_folder) as running:
            conversations = running.service.conversations
            running.say("Number 0.")
            ((_, size),) = conversations.memory.sizes.values()
            conversations.memory.limit = 12 * size
            for more in ({"pins": ["A fact. " * 60]}, {"messages": [{"role": "system", "content": "Be kind. " * 60}]}):
                for number in range(5):
                    asked = [*more.get("messages", []), {"role": "user", "content": f"{number}?"}]
                    running.say(**{**more, "messages": asked})
                assert len(conversations.awake) > 1
                running.say("And now?")
                sizes = [live.engine.cache.allocated_bytes() for live in conversations.awake.values()]
                assert max(sizes) > 3 * size
                assert sum(sizes) <= conversations.memory.limit
            assert running.ask("Much?", pins=["A fact."] * 101)[0] == 400

    def test_others_do_not_wait_while_a_long_conversation_wakes_up(
        self, tmp_path: Path, long_folder: Path, read: threading.Event
    ) -> None:
        with Running(tmp_path, long_folder, awake=2, running=2) as running:
            first = reply(running.say("Number 0."))
            for number in range(1, 4):
                running.ask(f"Number {number}.")
            with ThreadPoolExecutor(2) as executor:
                asked = [executor.submit(running.ask, "Number 0.", first, "And?") for _ in range(2)]
                assert running.ask("Meanwhile.")[0] == 200
                assert not any(future.done() for future in asked)
                with running.connect() as leaving:
                    said = [{"role": "user", "content": "Number 0."}, {"role": "assistant", "content": first}]
                    body = {"messages": [*said, {"role": "user", "content": "And?"}]}
                    leaving.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
                    wait_for(lambda: running.service.worker.lengths[1] == 3)
                wait_for(lambda: running.service.worker.lengths[1] == 2)
                read.set()
                origins = [future.result()[1]["h2o"]["origin"] for future in asked]
            assert sorted(origins) == ["branched", "continued"]

    def test_what_woke_up_for_a_client_that_leaves_sleeps_again(
        self, tmp_path: Path, long_folder: Path, read: threading.Event
    ) -> None:
        """Else its files would stay open."""
        with Running(tmp_path, long_folder, awake=1, running=1, max_reply=10**6) as running:
            worker, first = running.service.worker, running.say("Number 0.")
            openings = worker._openings
            running.say("Number 1.")
            with running.connect() as leaving, running.connect() as staying:
                body = {"messages": [{"role": "user", "content": "And?"}], "previous_response_id": first["id"]}
                leaving.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
                wait_for(lambda: bool(openings.loading))
                body = {"messages": [{"role": "user", "content": "A story."}], "max_tokens": 10**6, "ignore_eos": True}
                staying.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
                wait_for(lambda: bool(worker._jobs))
                read.set()
                wait_for(lambda: bool(openings.loaded))
                leaving.close()
                kept = running.service.store.conversations[first["h2o"]["conversation"]]
                wait_for(lambda: not worker._asked and not openings.loaded and kept.session is None)
                assert worker._jobs

    def test_refused_choices_leave_nothing(self, server: Running, caplog: pytest.LogCaptureFixture) -> None:
        unknown = {"previous_response_id": "chatcmpl-" + "0" * 32, "stream": True, "n": 3}
        assert [server.ask("And?", **unknown)[0] for _ in range(20)] == 20 * [404]
        gc.collect()
        assert not [record for record in caplog.records if record.name == "asyncio"]

    def test_a_client_that_leaves_stops_the_reply(self, server: Running) -> None:
        body = {"messages": [{"role": "user", "content": "Write a long story."}], "stream": True, "max_tokens": 2000}
        with server.connect() as connection:
            connection.request("POST", "/v1/chat/completions", json.dumps(body | {"temperature": 1.2}), JSON)
            with connection.getresponse() as answer:
                answer.read(900)
        wait_for(lambda: not server.service.active)

    def test_what_ends_does_not_wait_for_the_garbage_collector(self, server: Running, monkeypatch: Any) -> None:
        """All threads would wait for it, and caches take memory until then."""
        made, start = list[weakref.ref[Any]](), Conversations._converse

        def converse(self: Conversations, *options: Any) -> Conversation:
            conversation = start(self, *options)
            made.extend(map(weakref.ref, (conversation, conversation.engine, conversation.engine.cache)))
            return conversation

        monkeypatch.setattr(Conversations, "_converse", converse)
        gc.collect()
        gc.disable()
        try:
            self.test_a_client_that_leaves_stops_the_reply(server)
            server.ask("Say no.", store=False, n=2, logprobs=True)
            server.ask("Say yes.", store=False, response_format={"type": "json_object"})
            server.ask("Say it.", store=False, stop=["e"], recall="auto")
            post(server.url, "/v1/completions", {"prompt": "It is", "max_tokens": 4})
            post(server.url, "/v1/completions", {"prompt": "It is", "logit_bias": {"1": -(10**9)}})
            kept, deadline = made, time.monotonic() + 60
            while kept and time.monotonic() < deadline:  # the worker still has the last one
                awake = [live.conversation for live in server.service.conversations.awake.values()]
                used = [id(part) for each in awake for part in (each, each.engine, each.engine.cache)]
                kept = [ref for ref in made if ref() is not None and id(ref()) not in used]
            assert made
            assert not kept
        finally:
            gc.enable()
