"""The chat with a running server."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_stream.session.folders import session_names
from h2o_stream.session.server import _checked
from tests.commands import invoke

pytestmark = pytest.mark.usefixtures("own_home")

NAMES = ["id", "usage", "h2o", "choices", "delta", "content", "finish_reason", "slots", "seen", "prompt_tokens"]


class Server(ThreadingHTTPServer):
    """Answers each message by what it was asked, and keeps the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = list[dict[str, Any]]()
        self.known = set[str]()
        self.sends = b""

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        said = asked["messages"][-1]["content"]
        if said == "refuse":
            self.answer({"error": {"message": "this is refused"}}, 400)
            return
        if asked.get("previous_response_id", "first") not in {"first", *self.server.known}:
            self.answer({"error": {"message": "there is no such response"}}, 404)
            return
        self.send_response(200)
        self.end_headers()
        if self.server.sends:
            self.wfile.write(self.server.sends)
            return
        named = {"id": f"after {said}"} if self.server.known else {}
        slots = {"seen": 9, "cached": 5, "window": 8, "evicted": 4}
        for chunk in (
            {"choices": [{"delta": {"content": "You said "}}]},
            {"choices": [{"delta": {"content": said}, "finish_reason": "stop"}], "h2o": {"slots": slots}, **named},
            {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}},
        ):
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def answer(self, body: Any, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield made
        made.shutdown()


def test_what_is_new_is_sent_alone_if_the_server_knows_the_rest(server: Server) -> None:
    server.known = {"after one", "after three"}
    assert invoke("h2o-chat", "--server", server.url, typed="one\ntwo\nthree\n/undo\nfour\n").exit_code == 0
    assert [(len(asked["messages"]), asked.get("previous_response_id")) for asked in server.asked] == [
        (1, None), (1, "after one"), (1, "after two"), (5, None), (5, None),
    ]  # fmt: skip


def test_keys_are_not_for_others(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: whom the server named in its place got it, and an error showed one that no header can have."""
    keys = list[str | None]()

    def get(handler: Handler) -> None:
        keys.append(handler.headers.get("Authorization"))
        if "elsewhere" not in handler.path:
            handler.send_response(307)
            handler.send_header("Location", f"http://localhost:{server.server_address[1]}/elsewhere")
            handler.end_headers()
        else:
            handler.answer({"data": [{"id": "tiny"}]})

    monkeypatch.setattr(Handler, "do_GET", get)
    assert invoke("h2o-chat", "--server", server.url, "--api-key", "secret", "-p", "one").exit_code == 0
    assert keys == ["Bearer secret", None]
    refused = invoke("h2o-chat", "--server", server.url, "--api-key", "se\ncret", "-p", "one")
    assert (refused.exit_code, "cret" in refused.stderr) == (2, False)


def test_records(server: Server, tmp_path: Path) -> None:
    done = invoke("h2o-chat", "--server", server.url, "--jsonl", tmp_path / "run", "--temp", 0, typed="one\ntwo\n")
    assert done.exit_code == 0
    run, first, second, summary = map(json.loads, (tmp_path / "run").read_text().splitlines())
    assert (run["type"], run["model"], run["temperature"]) == ("run", "tiny", 0)
    assert (first["prompt_tokens"], first["new_tokens"], first["evicted_tokens"], first["finish"]) == (7, 2, 4, "stop")
    assert (second["turn"], second["text"], summary["turns"]) == (2, "You said two", 2)


def test_a_chat(server: Server) -> None:
    typed = "one\ntwo\n/undo\n/regen\n/edit\nthree\n/set temp 0.5\nrefuse\n/window 9\n/blub\nfour\n/exit\nfive\n"
    done = invoke("h2o-chat", "--server", server.url, "-s", "Be brief.", "-n", 5, "--session", "t", typed=typed)
    assert done.exit_code == 0
    said = ["one", "two", "one", "three", "four"]
    assert done.stdout.splitlines() == [f"You said {text}" for text in said[:4]] + ["", "You said four"]
    assert "7 + 2 tokens, kept 5 of 8, evicted 4, stop" in done.stderr
    assert "this is refused" in done.stderr
    assert "/window needs the model in this process" in done.stderr
    assert "/blub is not a command" in done.stderr
    assert server.asked[1]["messages"] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"},
        {"role": "assistant", "content": "You said one"}, {"role": "user", "content": "two"},
    ]  # fmt: skip
    assert (server.asked[0]["max_tokens"], server.asked[0]["model"]) == (5, "tiny")
    assert "temperature" not in server.asked[0]
    assert server.asked[-1]["temperature"] == 0.5
    invoke("h2o-chat", "--server", server.url, "-c", "and now?")
    contents = [message["content"] for message in server.asked[-1]["messages"]]
    assert contents == ["Be brief.", "three", "You said three", "four", "You said four", "and now?"]
    assert session_names() == ["t"]


def test_a_question_about_a_pipe(server: Server) -> None:
    done = invoke("h2o-chat", "--server", f"http://{server.url}/v1/", "What is it?", typed="A text.")
    assert done.stdout == "You said A text.\n\nWhat is it?\n"
    assert session_names() == []


ODD = st.recursive(
    st.none() | st.booleans() | st.sampled_from([-1, 0, 2.5, 10**400, "x", "\ud800", "\x1b[66m"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
)


@given(st.lists(st.dictionaries(st.sampled_from(NAMES), ODD, max_size=4), max_size=3))
def test_chunks_of_any_kind(chunks: list[Any]) -> None:
    for chunk in map(_checked, chunks):
        assert chunk.keys() == {"id", "usage", "h2o", "choices"}
        chunk["id"].encode()
        for choice in chunk["choices"]:
            "".join([*choice["delta"].values(), choice["finish_reason"]]).encode()
        assert not chunk["h2o"] or sum(chunk["h2o"]["slots"].values()) >= 0


@pytest.mark.parametrize("odd", [
    b'{"choices": null, "h2o": 3, "usage": [1]}', b'{"choices": [null, {"delta": "x"}]}', b"[" * 100_000, b"3", b"\xff",
    b'{"choices": [], "h2o": {"slots": {"seen": 1}}, "usage": {"prompt_tokens": "many"}}', b'{"error": 5}', b"",
])  # fmt: skip
def test_what_was_said_is_kept_whatever_comes_then(server: Server, odd: bytes) -> None:
    server.sends = b'data: {"choices": [{"delta": {"content": "So far \\ud800."}}]}\n\ndata: ' + odd
    done = invoke("h2o-chat", "--server", server.url, "--session", "t", typed="one\n")
    assert (done.exit_code, "Traceback" in done.stderr) == (0, False)
    server.sends = b""
    invoke("h2o-chat", "--server", server.url, "--session", "t", "-p", "two")
    said = [message["content"] for message in server.asked[-1]["messages"]]
    assert said == ["one", "So far \ufffd.", "two"]


def test_models_of_any_kind(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for data in ([3], [{"id": 5}], {"a": 1}, None, []):
        monkeypatch.setattr(Handler, "do_GET", lambda self, data=data: self.answer({"data": data}))
        done = invoke("h2o-chat", "--server", server.url, "-p", "a")
        assert (done.exit_code, "it has no model" in done.stderr) == (1, True)


@pytest.mark.parametrize(("url", "code", "words"), [
    ("ftp://x", 2, "is no address of a server"), ("127.0.0.1:1", 1, "does h2o-serve run there?"),
    ("http://[", 2, "is no address of a server"), ("a..b", 2, "is no address of a server"),
    ("http://\u0663", 1, "does h2o-serve run there?"),
])  # fmt: skip
def test_no_server(url: str, code: int, words: str) -> None:
    done = invoke("h2o-chat", "--server", url, "-p", "a")
    assert (done.exit_code, words in done.stderr) == (code, True)
