"""Requests as bytes: what HTTP allows is answered, what it forbids is refused, and the server goes on."""

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.native_builds import needs_library
from tests.served import Running
from tests.waiting import wait_for

pytestmark = needs_library

BODY = json.dumps({"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4, "temperature": 0}).encode()
JSON, CHUNKED, CLOSE = "Content-Type: application/json\r\n", "Transfer-Encoding: chunked\r\n", "Connection: close\r\n"
SIZE = f"Content-Length: {len(BODY)}\r\n"
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)
CHAT = "/v1/chat/completions"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("served"), tiny_folder, unread_s=1, max_reply=10**6) as running:
        yield running


@pytest.fixture(autouse=True)
def _goes_on(server: Running, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    server.check_idle()
    assert not any(record.exc_info for record in caplog.get_records("call"))


def exchange(server: Running, *pieces: bytes, half_close: bool = False) -> bytes:
    """All that a server sends to a client that sends these pieces, until one of them closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.02 * (len(pieces) > 1))
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with suppress(ConnectionResetError):  # it has not read all that was sent
            while more := connection.recv(2**16):
                answer += more
        return answer


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


def request(method: str, target: str, headers: str = CLOSE, body: bytes = b"", host: str = "localhost") -> bytes:
    return f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n{headers}\r\n".encode() + body


LEGAL = {
    "chunks": request("POST", CHAT, JSON + CHUNKED + CLOSE, CHUNK + b"0\r\n\r\n"),
    "an extension and a trailer": request(
        "POST", CHAT, JSON + CHUNKED + CLOSE, CHUNK.replace(b"\r", b';a="b"\r', 1) + b"0;c\r\nX-Sum: 1\r\n\r\n"
    ),
    "zeros before a size": request("POST", CHAT, JSON + CHUNKED + CLOSE, b"000000" + CHUNK + b"0\r\n\r\n"),
    "the same length twice": request("POST", CHAT, JSON + CLOSE + SIZE + SIZE, BODY),
    "HTTP/1.0": request("POST", CHAT, JSON + SIZE, BODY).replace(b"HTTP/1.1", b"HTTP/1.0", 1),
    "HTTP/1.0 without a host": b"GET /health HTTP/1.0\r\n\r\n",
    "an upgrade": request("GET", "/health", "Upgrade: h2c\r\nConnection: Upgrade, close\r\n"),
    "a body of a GET": request("GET", "/health", CLOSE + "Content-Length: 3\r\n", b"abc"),
}

ILLEGAL = {
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": request("GET", "/health", "Host: localhost\r\n"),
    "two lengths": request("POST", CHAT, JSON + SIZE + "Content-Length: 5\r\n", BODY),
    "a negative length": request("POST", CHAT, JSON + "Content-Length: -1\r\n"),
    "a negative chunk": request("POST", CHAT, JSON + CHUNKED, b"-1\r\n"),
    "a chunk of no size": request("POST", CHAT, JSON + CHUNKED, b"zz\r\n"),
    "a chunk that does not end": request("POST", CHAT, JSON + CHUNKED, CHUNK[:-2] + b"xx0\r\n\r\n"),
    "another encoding": request("POST", CHAT, JSON + "Transfer-Encoding: gzip, chunked\r\n", CHUNK + b"0\r\n\r\n"),
    "trailers without an end": request("POST", CHAT, JSON + CHUNKED, CHUNK + b"0\r\n" + b"X: y\r\n" * 9000),
    "a space before a colon": b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
}


@pytest.mark.parametrize("sent", LEGAL.values(), ids=LEGAL)
def test_what_is_allowed(server: Running, sent: bytes) -> None:
    assert statuses(exchange(server, sent)) == [200]


@pytest.mark.parametrize("sent", ILLEGAL.values(), ids=ILLEGAL)
def test_what_is_forbidden(server: Running, sent: bytes) -> None:
    assert statuses(exchange(server, sent)) == [400]


def test_a_chunk_of_any_size_is_not_waited_for_forever(server: Running) -> None:
    sent = request("POST", CHAT, JSON + CLOSE + CHUNKED, b"F" * 16 + b"\r\n" + BODY)
    assert statuses(exchange(server, sent)) == [408]


def test_a_body_that_is_not_awaited(server: Running) -> None:
    """Whatever is wrong with it, its request was answered, and nothing is said about it."""
    assert statuses(exchange(server, request("GET", "/health", CHUNKED), b"zz\r\n")) == [200]


def test_two_ways_to_say_where_a_request_ends(server: Running) -> None:
    """What a proxy may take for a request of somebody else is not answered as one."""
    sent = request("POST", CHAT, JSON + CHUNKED + "Content-Length: 3\r\n", CHUNK + b"0\r\n\r\n" + GET)
    assert statuses(exchange(server, sent)) == [200]


def test_a_client_may_wait_before_it_sends_its_body(server: Running) -> None:
    expects = "Expect: 100-continue\r\n"
    assert statuses(exchange(server, request("POST", CHAT, JSON + CLOSE + expects + SIZE), BODY)) == [100, 200]
    assert statuses(exchange(server, request("POST", CHAT, CLOSE + expects + SIZE))) == [415]
    headers = JSON + CLOSE + expects + "Content-Length: 99999999\r\n"
    assert statuses(exchange(server, request("POST", CHAT, headers))) == [413]


def test_other_methods_are_refused_and_named(server: Running) -> None:
    """The answer to HEAD is that of GET, without its text."""
    for path, methods in (("/", b"GET HEAD"), ("/health", b"GET HEAD"), ("/v1/models", b"GET HEAD"), (CHAT, b"POST")):
        for method in ("OPTIONS", "DELETE", "BREW", *(["HEAD"] if path == CHAT else [])):
            answer = exchange(server, request(method, path))
            assert statuses(answer) == [405]
            allowed = answer.partition(b"\r\nallow: ")[2].partition(b"\r\n")[0]
            assert sorted(allowed.split(b", ")) == methods.split()
        if path != CHAT:
            got, head = (exchange(server, request(method, path)) for method in ("GET", "HEAD"))
            heads = (re.sub(b"date: .*", b"", answer.partition(b"\r\n\r\n")[0]) for answer in (got, head))
            assert head.endswith(b"\r\n\r\n")
            assert len({*heads}) == 1


POST = request("POST", CHAT, JSON + SIZE, BODY)
PAGE = request("GET", "/", "")
STREAM = BODY[:-1] + b', "stream": true}'


def test_requests_one_after_another_over_a_connection(server: Running) -> None:
    """Also if all are sent before the first answer."""
    for pieces in ([POST, POST, request("GET", "/health")], [POST + POST + request("GET", "/health")]):
        assert statuses(exchange(server, *pieces)) == [200] * 3


@pytest.mark.parametrize(
    ("sent", "count"), [(POST, 1), (GET, 1), (POST + GET + POST, 3), (PAGE, 1), (PAGE.replace(b"P/1.1", b"P/1.0"), 1)]
)  # fmt: skip
def test_a_client_that_ends_its_side_gets_its_answers(server: Running, sent: bytes, count: int) -> None:
    answer = exchange(server, sent, half_close=True)
    assert [status for status in statuses(answer) if b"POST" not in sent or status != 100] == [200] * count
    if sent == POST:
        sent = request("POST", CHAT, JSON + f"Content-Length: {len(STREAM)}\r\n", STREAM)
        assert exchange(server, sent, half_close=True).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 3, "logprobs": True}, {"n": 3, "stream": True}], ids=str)
@pytest.mark.parametrize("tokens", [0, 5])
def test_clients_that_leave(server: Running, version: bytes, more: dict[str, object], tokens: int) -> None:
    """Their replies end soon, though one that leaves first does what one does that only ends its side."""
    long = {**json.loads(BODY), "max_tokens": 10**6, "ignore_eos": True, "window": 64, **more}
    body, worker = json.dumps(long).encode(), server.service.worker
    sent = request("POST", CHAT, JSON + f"Content-Length: {len(body)}\r\n", body).replace(b"1.1", version, 1)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(sent)
        if tokens:
            wait_for(lambda: len(worker._jobs) == more.get("n", 1) and worker._jobs[-1].tokens >= tokens)
    wait_for(lambda: not server.service.active)
