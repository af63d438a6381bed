"""Faults of the disk, of clients and of the server itself: one conversation gets an error, the others go on."""

import asyncio
import gc
import json
import shutil
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from h2o_stream.config import ModelConfig, SamplingConfig, ServeConfig
from h2o_stream.serve import service, worker
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
from h2o_stream.serve.worker import Worker
from tests import served
from tests.disturbances import fail_once
from tests.native_builds import needs_library
from tests.served import CACHE, Listening, Running, connected
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


def test_one_reply_is_begun_between_two_steps(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    happened = list[str]()

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (happened.append(name), function(*given))[1]

    for name in ("_begin", "_step"):
        monkeypatch.setattr(Worker, name, noting(name, getattr(Worker, name)))
    assert server.ask("All at once?", n=6)[0] == 200
    begun = "".join(name[1] for name in happened).split("s")
    assert sum(map(len, begun)) == 6
    assert max(map(len, begun)) == 1


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
