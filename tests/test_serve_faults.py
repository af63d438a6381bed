"""Faults of the disk, of clients and of the server itself: one conversation gets an error, the others go on."""

import asyncio
import gc
import json
import shutil
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from h2o_stream.cache import state
from h2o_stream.cache.slots import Slots
from h2o_stream.config import ModelConfig, SamplingConfig, ServeConfig
from h2o_stream.models import tokenizer
from h2o_stream.recall import recall
from h2o_stream.serve import app, aside, chat, conversations, endings, service, worker
from h2o_stream.serve.app import make_app
from h2o_stream.serve.conversations import Conversations
from h2o_stream.serve.endings import Endings
from h2o_stream.serve.errors import ApiError
from h2o_stream.serve.live import Live
from h2o_stream.serve.messages import Dialogue
from h2o_stream.serve.metrics import Metrics
from h2o_stream.serve.replies import Ask, Failed, Message, Piece
from h2o_stream.serve.requests import Options, parse_json
from h2o_stream.serve.store import Store
from h2o_stream.serve.stream import Pace
from h2o_stream.serve.worker import Worker
from h2o_stream.session import state_files
from tests import served
from tests.disturbances import fail_once
from tests.native_builds import needs_library
from tests.serve_load import post
from tests.served import CACHE, Listening, Running, connected, reply
from tests.waiting import wait_for

pytestmark = needs_library


server, _goes_on = served.impatient_server, served.goes_on


FAULTS = [
    (Store, "save"), (Store, "_index"), (Store, "to_forget"), (Live, "add"), (Conversations, "commit"),
    (Conversations, "committed"), (Conversations, "open"), (Metrics, "opened"), (Metrics, "replied"),
    (Endings, "_save"), (Worker, "_begin"),
]  # fmt: skip


@pytest.mark.every(2)
@pytest.mark.parametrize(("owner", "name"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_one_reply_fails(server: Running, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    failed = fail_once(monkeypatch, owner, name, ZeroDivisionError())
    with ThreadPoolExecutor(3) as executor:
        answers = list(executor.map(lambda number: server.ask(f"{name} {number}?"), range(3)))
    assert failed
    assert sorted(status for status, _ in answers) == [200, 200, 500]
    refused = next(answer["error"]["message"] for status, answer in answers if status == 500)
    assert "ZeroDivisionError" in refused or refused.startswith("the turn was not saved: ")


def test_what_fails_between_replies_ends_them_only(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = fail_once(monkeypatch, Metrics, "stepped", ZeroDivisionError())
    assert server.ask("What fails?")[0] == 500
    assert failed


def test_a_conversation_that_cannot_be_closed(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        failed = fail_once(patch, Conversations, "drop", ZeroDivisionError())
        assert server.ask("Once.", store=False, n=2)[0] == 200
    assert failed


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_client_that_cannot_be_told(server: Running, after: int) -> None:
    """What was said until then stays, as if the client had left."""
    options, received, failed = server.service.options, list[Message](), threading.Event()

    def send(message: Message) -> None:
        if len(received) == after:
            failed.set()
            raise RuntimeError("Event loop is closed")
        received.append(message)

    before = {*server.service.store.conversations}
    config = SamplingConfig(temperature=0, max_tokens=200)
    server.service.worker.submit(Ask(Dialogue(None, (), "Tell me."), ["first"], options, config, send))
    assert failed.wait(10)
    server.say("Is it saved?")
    wait_for(lambda: server.service.worker.lengths == (0, 0))
    new = {*server.service.store.conversations} - before
    entries = [entry for name in new for entry in server.entries(name, 1) if entry.prompt == "Tell me."]
    said = "".join(message.text for message in received if isinstance(message, Piece))
    assert len(entries) == bool(after)
    assert all(entry.finish == "interrupted" and entry.text.startswith(said) for entry in entries)


LONG = {"max_tokens": 2000, "stream": True, "logprobs": True, "top_logprobs": 20, "min_p": 1.0, "temperature": 1}


def test_a_client_that_reads_nothing_does_not_hold_others(server: Running) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Write much."}], **LONG}).encode()
    with connected(server, body) as connection:
        connection.recv(100)
        assert [server.ask(f"Others {number}?")[0] for number in range(5)] == [200] * 5
        wait_for(lambda: not server.service.active)


@pytest.mark.parametrize("drip", [0, 1024])
def test_a_client_that_does_not_read_is_disconnected(caplog: pytest.LogCaptureFixture, drip: int) -> None:
    """Neither one that reads nothing may stay, nor one that reads a little all the time."""
    ended, sent = threading.Event(), [0]

    async def answer(_: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield bytes(2**16)
                    await asyncio.sleep(0)
                    sent[0] += 2**16
            finally:
                ended.set()

        return StreamingResponse(chunks())

    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    with Listening(app, ServeConfig(port=0, unread_s=0.3)) as serving, connected(serving, b"") as connection:
        while not ended.wait(0.02):
            connection.recv(drip)
    assert sent[0] < 64 * 2**20
    assert caplog.text.count("left its reply unread") == 1


def test_a_client_may_have_all_the_time(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(_: Request) -> Response:
        return Response(b"yes")

    with (
        Listening(Starlette(routes=[Route("/", answer)]), ServeConfig(port=0, unread_s=1e9)) as serving,
        socket.create_connection(("127.0.0.1", serving.port), 10) as connection,
    ):
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b"".join(iter(lambda: connection.recv(1024), b"")).endswith(b"yes")
    assert not caplog.records


def test_a_client_that_reads_slowly_gets_all(server: Running) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Write."}], **LONG, "max_tokens": 60}).encode()
    with connected(server, body) as connection:
        got = b""
        while not got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            got += connection.recv(8192)
            time.sleep(0.01)
    assert got.count(b'"finish_reason": "length"') == 1


def test_a_request_that_does_not_arrive_is_refused(server: Running) -> None:
    with connected(server, b'{"messages": [', 10) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


def drip(connection: socket.socket, data: bytes, until: float) -> None:
    """Send the same again and again."""
    while time.monotonic() < until:
        connection.sendall(data)
        time.sleep(0.05)


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["first", "second"])
def test_headers_that_come_drop_by_drop_are_not_waited_for(server: Running, before: bytes) -> None:
    """Neither on a new connection nor on one over which a request was answered."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(before)
        if before:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        started = time.monotonic()
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n")
        with pytest.raises(ConnectionError):
            drip(connection, b"X-More: x\r\n", started + 10)
        assert time.monotonic() > started + 0.4


def test_a_server_without_replies_gives_free_memory_back(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and not again before it has done something. Conversations hold no logits."""
    trims, batch = list[int](), server.service.worker._batch
    server.check_idle()
    gc.collect()  # replies that other tests let fail
    logits = weakref.ref(batch._logits)
    monkeypatch.setattr(worker, "_IDLE_S", 0.05)
    server.service.worker.call(lambda: monkeypatch.setattr(worker, "trim_heap", lambda: trims.append(1)))
    wait_for(lambda: trims)
    time.sleep(0.2)
    assert len(trims) == 1
    assert logits() is None


def test_the_first_question_does_not_wait_for_tables_of_recall(tiny_folder: Path, tmp_path: Path) -> None:
    model = service.load_served(ModelConfig(str(tiny_folder), dtype="float32"), CACHE)
    served = service.Service(model, ServeConfig(folder=tmp_path), Options(CACHE, "auto"))
    served.start()
    served.close()
    assert "_table" in vars(served.conversations._terms)


def test_halves_of_characters_are_looked_for_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else has a turn while a whole request is written by one call."""
    monkeypatch.delattr(json.JSONEncoder, "encode")
    assert parse_json(b'{"a": ["\\ud83d\\ude00", 1]}') == {"a": ["\U0001f600", 1]}
    for half in (b'["\\ud83d"]', b'{"\\ude00": 1}', b'[[{"a": "\\uDE00\\uD83D"}]]'):
        with pytest.raises(ValueError, match="surrogates"):
            parse_json(half)


def test_a_whole_answer_comes_in_one_piece() -> None:
    sent = list[Message]()
    piece, error = Piece("a", "", ()), Failed(ApiError(500, "no"))
    for pieces in (True, False):
        ask = Ask(Dialogue(None, (), "x"), [], Options(CACHE), SamplingConfig(), sent.append, pieces=pieces)
        assert all([ask.try_send(piece), ask.try_send(error)])
    assert sent == [piece, error, error]


def test_a_client_that_leaves_before_its_stream_begins(server: Running) -> None:
    """As the application sees it: the request is there, and so is its end."""
    body = json.dumps({"messages": [{"role": "user", "content": "Stay?"}], "stream": True}).encode()
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
             "headers": [(b"content-type", b"application/json")]}  # fmt: skip
    received: list[dict[str, Any]] = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return received.pop(0) if len(received) > 1 else received[0]

    async def send(_: Any) -> None:
        pass

    asyncio.run(make_app(server.service)(scope, receive, send))  # type: ignore[arg-type]
    wait_for(lambda: not server.service.worker._jobs)
    assert not server.service.active


def test_few_replies_are_begun_between_two_steps(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    happened = list[str]()

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (happened.append(name), function(*given))[1]

    for name in ("_begin", "_step"):
        monkeypatch.setattr(Worker, name, noting(name, getattr(Worker, name)))
    assert server.ask("All at once?", n=6)[0] == 200
    begun = "".join(name[1] for name in happened).split("s")
    assert sum(map(len, begun)) == 6
    assert max(map(len, begun)) <= worker._BEGUN


def test_parts_of_prompts_are_as_long_as_others_can_wait_for() -> None:
    pace, found = Pace(), list[int]()
    for seconds, replies in ((9, False), (0.2, True), (0.2, True), (0.05, True), (9, True), (9, True), (0.01, True)):
        pace.note(seconds, replies)
        found.append(pace.tokens)
    assert found == [256, 128, 64, 64, 32, 32, 64]


def test_long_texts_are_read_where_nobody_waits(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the thread that steps all replies nor in that of the connections; and what cannot fit is not read."""
    server.say("Ready?")
    read: list[tuple[str, str, int]] = []

    def noting(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            text = next(value for value in args if isinstance(value, str | bytes | list))
            read.append((what, threading.current_thread().name, len(str(text))))
            return function(*args, **more)

        return call

    monkeypatch.setattr(tokenizer, "encode", noting("tokens", tokenizer.encode))
    monkeypatch.setattr(json.JSONDecoder, "decode", noting("JSON", json.JSONDecoder.decode))
    monkeypatch.setattr(chat, "parse_dialogue", noting("messages", chat.parse_dialogue))
    text, other = "A long text. " * 2000, [{"role": "user", "content": "Hello."}]
    with ThreadPoolExecutor(2) as executor:
        reply = executor.submit(server.ask, text, "It is.", "Why?", recall="auto")
        assert server.ask("A short one.")[0] == reply.result()[0] == 200
    threads = {what: {name for found, name, size in read if found == what and size >= len(text)} for what, *_ in read}
    assert all(name.startswith("h2o-read") for name in threads["tokens"])
    assert threads["tokens"]
    assert threads["JSON"] | threads["messages"] <= {name for _, name, _ in read if name.startswith("h2o-aside")}
    read.clear()
    for module in (aside, service):
        monkeypatch.setattr(module, "LONG", 1000)
    for refused, param in (
        ({"messages": [{"role": "system", "content": text}, *other]}, "messages"),
        ({"messages": other, "pins": [text]}, "pins"),
        ({"messages": [{"role": "system", "content": text[:6000]}, *other], "window": 300}, "messages"),
    ):
        status, answer = post(server.url, "/v1/chat/completions", refused)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", param)
    assert {name[:9] for what, name, size in read if what == "tokens" and size >= 6000} == {"h2o-aside"}
    assert not [what for what, _, size in read if what == "tokens" and size >= len(text)]


def test_a_long_opening_is_read_once_where_nobody_waits(
    tmp_path: Path, long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made tokens of to see whether it fits, and with the first message, but not by the thread of all replies."""
    threads, encode, system = list[str](), tokenizer.encode, "Be kind to all. " * 700

    def noting(backend: Any, text: str, *more: Any) -> Any:
        if len(text) >= len(system) - 1:
            threads.append(threading.current_thread().name.rpartition("-")[0])
        return encode(backend, text, *more)

    with Running(tmp_path, long_folder, awake=1, running=1) as running:
        monkeypatch.setattr(tokenizer, "encode", noting)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "Are you?"}]
        answer = running.say(messages=messages)
        assert threads == ["h2o-aside", "h2o-read"]
        threads.clear()
        running.say("Go to sleep.")
        running.service.conversations.templates._kept.clear()  # as after a restart
        more = [{"role": "assistant", "content": reply(answer)}, {"role": "user", "content": "And now?"}]
        assert running.say(messages=messages + more)["h2o"]["turns_known"] == 1
        assert threads == ["h2o-load"]


def test_states_are_loaded_and_copied_where_nobody_waits(
    tmp_path: Path, long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 80 MB, which is read, checked and copied, held all replies for 75 ms, and a busy machine for a second."""
    handled = Counter[str]()

    def noting(function: Callable[..., Any], size: Callable[[Any], int], place: int) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            handled[threading.current_thread().name.rstrip("-_0123456789")] += size(values[place])
            return function(*values)

        return call

    def all_bytes(arrays: Any) -> int:
        return sum(array.nbytes for array in arrays.values())

    for module in (conversations, endings):
        monkeypatch.setattr(module, "LARGE", 1)
    monkeypatch.setattr(state_files, "decode_state", noting(state_files.decode_state, len, 0))
    monkeypatch.setattr(state, "_crc", noting(state._crc, lambda array: array.nbytes, 0))
    monkeypatch.setattr(Slots, "load", noting(Slots.load, all_bytes, 1))
    monkeypatch.setattr(Slots, "arrays", noting(Slots.arrays, lambda slots: slots.nbytes, 0))
    with Running(tmp_path, long_folder, awake=2, running=2) as running:
        first = running.say("Number 0.")
        asked = ["Number 0.", reply(first), "And?"]
        opened = [running.say(*asked, **more)["h2o"]["origin"] for more in ({"store": False}, {}, {"n": 2}, {})]
        for number in range(2):
            running.say(f"Go to sleep, {number}.")
        opened.append(running.say("And?", previous_response_id=first["id"])["h2o"]["origin"])
        running.say(*asked[:1], reply(first), "Then?", stop=["e"])
        running.say(*asked[:1], reply(first), "Then?", "It is.", "No?", stop=["e"])
    assert opened == ["branched", "continued", *3 * ["branched"]]
    assert {*handled} == {"h2o-load", "h2o-read", "h2o-save"}


def test_long_lists_of_tokens_are_written_where_nobody_waits(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer with 20 likely tokens for each of 16,384 would stop all others for seconds."""
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "temperature": 0, "store": False}
    here, threads = server.say("A list.", **asked)["choices"], list[str]()

    def noting(function: Callable[..., Any], *values: Any) -> Any:
        threads.append(threading.current_thread().name)
        return function(*values)

    for module, name in ((chat, "chat_logprobs"), (app, "patient_json")):
        monkeypatch.setattr(module, name, partial(noting, getattr(module, name)))
    for module in (aside, app):
        monkeypatch.setattr(module, "LONG", 30)
    assert server.say("A list.", **asked)["choices"] == here
    assert [name[:9] for name in threads] == 2 * ["h2o-aside"]


def test_what_recall_searches_is_indexed_where_nobody_waits(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a megabyte that a client pasted held all replies for seconds, when it asked about that."""
    seen, text = list[str](), "My code is 4711. Your code is 1174. " * 80

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            if any(len(value) >= len(text) - 1 for value in values if isinstance(value, str)):
                seen.append(threading.current_thread().name.rstrip("-_0123456789"))
            return function(*values)

        return call

    monkeypatch.setattr(recall, "locate", noting(recall.locate))
    monkeypatch.setattr(recall, "cut_pieces", noting(recall.cut_pieces))
    asked = {"recall": "auto", "previous_response_id": server.say(text, recall="auto")["id"]}
    assert server.say("What is my code?", **asked)["h2o"]["origin"] == "continued"
    assert seen == ["h2o-save"]
    assert server.say("Summarize the text above.", **asked)["h2o"]["origin"] == "branched"
    assert seen == ["h2o-save", "h2o-read", "h2o-read", "h2o-save-long"]
    seen.clear()
    monkeypatch.setattr(recall, "decide", lambda *_: seen.append(threading.current_thread().name[:8]) or [])
    for mode in ("wide", "auto"):
        said = server.say("My code is 4711.", recall=mode)["id"]
        server.say("What is my code?", recall=mode, previous_response_id=said)
    assert seen == ["h2o-read", "h2o-serv"]


def test_long_texts_leave_the_processors_to_replies(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the same tokens; where somebody waits for them at a terminal, they do not."""
    monkeypatch.setattr(tokenizer, "_LONG", 10)
    backend, text = server.service.model.tokenizer.backend_tokenizer, "A long text é."
    here, threads = tokenizer.encode(backend, text), list[str]()
    monkeypatch.setattr(
        tokenizer,
        "partial",
        lambda *_, **__: (
            lambda: (
                threads.append(threading.current_thread().name),
                backend.encode_batch_fast([text], add_special_tokens=False),
            )[1]
        ),
    )
    assert aside.Threads("h2o-test").submit(lambda: tokenizer.encode(backend, text)).result() == here
    assert tokenizer.encode(backend, text) == here
    assert [name.partition("_")[0] for name in threads] == ["h2o-tokens", threading.current_thread().name]


def test_a_tokenizer_that_panics_ends_its_reply_only(tmp_path: Path, tiny_folder: Path) -> None:
    """The library's panics are no `Exception`. This decoder fails at one token."""
    shutil.copytree(tiny_folder, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    described, strip = json.loads(path.read_text()), {"type": "Strip", "content": "e", "start": 0, "stop": 2}
    described["decoder"] = {"type": "Sequence", "decoders": [described["decoder"], strip]}
    path.write_text(json.dumps(described))
    with Running(tmp_path / "served", tmp_path / "model") as server:
        for _ in range(2):
            status, answer = server.ask("A letter?", logit_bias={"e": 100})
            assert (status, "cannot write token" in answer["error"]["message"]) == (400, True)
            assert server.ask("Others?", logit_bias={"e": -100})[0] == 200
