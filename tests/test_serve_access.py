"""Who may use a server: keys, pages of others, names of others that point to this machine."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from h2o_stream.config import ServeConfig
from h2o_stream.errors import ConfigError, H2OStreamError
from h2o_stream.serve.access import Access, Gate
from tests.native_builds import needs_library
from tests.serve_load import post
from tests.served import Running, reply

JSON = {"content-type": "application/json"}


def status(config: ServeConfig, method: str, headers: Any, path: str = "/v1/chat/completions") -> int:
    """Of the answer of an application that lets all in, behind the gate."""
    listed = [(name.encode(), value.encode("latin-1")) for name, value in dict(headers).items()]
    scope = {"type": "http", "method": method, "path": path, "headers": listed, "server": ("192.168.1.7", 8000)}
    sent = list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    asyncio.run(Gate(Response(b"in"), Access(config))(scope, receive, send))  # type: ignore[arg-type]
    return int(sent[0]["status"])


LOCAL = ServeConfig()
OPEN = ServeConfig(host="0.0.0.0", allow_anyone=True)
OWN = [
    "localhost", "localhost:8000", "LOCALHOST:1", "localhost.:8000", "chat.localhost:8000", "127.0.0.1",
    "127.0.0.1:8000", "127.1.2.3", "[::1]", "[::1]:8000", "192.168.1.7:8000",
]  # fmt: skip
FOREIGN = [
    "", " ", "x", "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
    "127.0.0.1@evil.example",
    "evil.example/127.0.0.1", "127.0.0.1/health?x=", "127.0.0.1:x", "[::1", "localhost#",
    "localhost?", "user@localhost", "0x7f.evil.example", "[::1].evil.example", "\xe9vil.example",
]  # fmt: skip


@pytest.mark.parametrize("host", OWN)
def test_the_servers_own_names(host: str) -> None:
    for method, more in (("GET", {}), ("POST", JSON)):
        assert status(LOCAL, method, {"host": host, **more}) == 200


@pytest.mark.parametrize("host", FOREIGN)
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/"])
def test_names_of_others(host: str, path: str) -> None:
    for config in (LOCAL, OPEN, ServeConfig(api_key="k")):
        assert status(config, "GET", {"host": host}, path) == 403


def test_other_names_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Desk.example.net")
    config = ServeConfig(host="chat.example.org", allow_anyone=True, allow_host=("Proxy.example.org:8443",))
    for host in ("desk", "desk.local:8000", "desk.example.net", "chat.example.org", "proxy.example.org"):
        assert status(config, "GET", {"host": host}) == 200
    assert status(config, "GET", {"host": "example.net"}) == 403
    assert status(ServeConfig(allow_host=("*",)), "GET", {"host": "evil.example"}) == 200


def test_addresses_if_others_may_come() -> None:
    """Behind the port of a container, the address that clients use is none of ours; no name points to it."""
    for host in ("10.2.3.4:8080", "[2001:db8::1]:80"):
        assert status(OPEN, "GET", {"host": host}) == 200
        assert status(LOCAL, "GET", {"host": host}) == 403


ORIGINS = [
    ("http://localhost:8000", "localhost:8000", 200), ("http://127.0.0.1:8000", "127.0.0.1:8000", 200),
    ("http://[::1]:8000", "[::1]:8000", 200), ("https://localhost", "localhost", 200),
    ("http://localhost:80", "localhost", 200),
    ("http://localhost:3000", "localhost:8000", 403), ("http://evil.example", "localhost:8000", 403),
    ("null", "localhost:8000", 403), ("", "localhost:8000", 403),
    ("http://localhost:8000.evil.example", "localhost:8000", 403),
    ("http://localhost:8000@evil.example", "localhost:8000", 403), ("localhost:8000", "localhost:8000", 403),
    ("file://", "localhost:8000", 403),
]  # fmt: skip


@pytest.mark.parametrize(("origin", "host", "expected"), ORIGINS)
def test_pages(origin: str, host: str, expected: int) -> None:
    for site in ("same-origin", "same-site", "cross-site"):
        headers = {"host": host, "origin": origin, "sec-fetch-site": site}
        assert status(LOCAL, "POST", {**headers, **JSON}) == status(LOCAL, "GET", headers) == expected


def test_allowed_pages() -> None:
    config = ServeConfig(allow_origin=("https://chat.example.org",))
    for origin, expected in (("https://chat.example.org", 200), ("http://chat.example.org", 403)):
        headers = {"host": "localhost", "origin": origin, "sec-fetch-site": "cross-site", **JSON}
        assert status(config, "POST", headers) == expected
    assert status(ServeConfig(allow_origin=("*",)), "GET", {"host": "localhost", "origin": "null"}) == 200
    for origin in ("chat.example.org", "https://chat.example.org/", "https://"):
        with pytest.raises(ConfigError, match="--allow-origin"):
            ServeConfig(allow_origin=(origin,))


def test_requests_of_pages_without_an_origin() -> None:
    """Pictures, forms and links of other pages; only a link to the page is followed."""
    cross = {"host": "localhost", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert status(LOCAL, "GET", cross, "/") == 200
    assert status(LOCAL, "GET", {**cross, "sec-fetch-mode": "no-cors"}, "/") == 403
    assert status(LOCAL, "GET", cross, "/metrics") == 403
    assert status(LOCAL, "POST", {**cross, **JSON}, "/") == 403


@pytest.mark.parametrize(
    "kind", [None, "", "text/plain", "application/x-www-form-urlencoded", "text/plain; application/json",
             "multipart/form-data", "application/jsonp", "json"],
)  # fmt: skip
def test_only_json_is_taken(kind: str | None) -> None:
    headers = {"host": "localhost"} | ({} if kind is None else {"content-type": kind})
    assert status(LOCAL, "POST", headers) == 415
    assert status(LOCAL, "POST", {"host": "localhost", "content-type": "Application/JSON; charset=utf-8"}) == 200


def test_other_machines_need_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of the team\none\n\ntwo\n")
    for host in ("0.0.0.0", "::", "192.168.1.7", "desk.example.net", ""):
        with pytest.raises(ConfigError, match="--allow-anyone"):
            ServeConfig(host=host)
        ServeConfig(host=host, api_key="k")
        assert ServeConfig(host=host, api_key_file=keys).api_keys == ("one", "two")
        ServeConfig(host=host, allow_anyone=True)
    for host in ("127.0.0.1", "127.5.5.5", "::1", "localhost"):
        ServeConfig(host=host)
    keys.write_text("\n# none\n")
    for path in (keys, tmp_path / "missing", tmp_path):
        with pytest.raises(H2OStreamError, match="--api-key-file"):
            ServeConfig(api_key_file=path)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "keys").write_text("two\nschl\xfcssel\n", "utf-8")
    keys, origins = folder / "keys", ("https://chat.example.org",)
    with Running(folder, tiny_folder, api_key="one", api_key_file=keys, allow_origin=origins) as running:
        yield running


def get(server: Running, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, str]:
    """Status, headers and text of an answer, to a request with exactly these headers."""
    with server.connect() as connection:
        connection.putrequest(method, path, skip_host=True)
        for name, value in {"Host": "localhost", **headers}.items():
            connection.putheader(name.replace("_", "-"), value.encode())
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()


@needs_library
class TestServer:
    def test_keys(self, guarded: Running) -> None:
        for path in ("/v1/models", "/metrics", f"/v1/models/{guarded.service.name}"):
            for key in ("one", "two", "schl\xfcssel"):
                assert get(guarded, path, Authorization=f"Bearer {key}")[0] == 200
                assert get(guarded, path, Authorization=f"bearer  {key}")[0] == 200
            for key in ("", "three", "on", "onee", "one two"):
                assert get(guarded, path, Authorization=f"Bearer {key}")[0] == 401
        assert get(guarded, "/health")[0] == 200

    @pytest.mark.parametrize("host", ["127.0.0.1/health?x=", "localhost/health", "localhost/health#", "/health"])
    def test_the_host_is_no_part_of_the_path(self, guarded: Running, host: str) -> None:
        for path in ("/metrics", "/v1/models", "/health/../metrics", "/healthy", "//health"):
            assert get(guarded, path, Host=host)[0] == 403

    @pytest.mark.parametrize(
        "path", ["/health/metrics", "/health/", "/health/../metrics", "/%2e/metrics", "/healthmetrics"]
    )
    def test_only_health_needs_no_key(self, guarded: Running, path: str) -> None:
        assert get(guarded, path)[0] in (401, 404, 307)

    @pytest.mark.parametrize(
        ("target", "status"),
        [
            ("http://localhost/health", 200), ("http://localhost", 200), ("HTTP://127.0.0.1:9/health?x=http://x/", 200),
            ("http://LOCALHOST./v1/models", 401), ("http://localhost/health/../metrics", 404), ("http:///health", 403),
            ("http://evil.example/health", 403), ("http://localhost@evil.example/health", 403),
            ("http://evil.example@localhost/health", 403), ("http://localhost#/health", 403),
            ("http://evil.example%2flocalhost/health", 403), ("http://localhost/http://localhost/health", 404),
        ],
    )  # fmt: skip
    def test_absolute_targets(self, guarded: Running, target: str, status: int) -> None:
        """Their authority takes the place of the host and is checked as it is; their path is what needs a key."""
        for host in ("localhost", "evil.example"):
            assert get(guarded, target, Host=host)[0] == status
        assert get(guarded, "ftp://localhost/health")[0] == get(guarded, "*", "OPTIONS")[0] == 404

    def test_labels_of_metrics_are_known_routes(self, guarded: Running) -> None:
        before = guarded.service.metrics_text().count(b"h2o_requests_total{")
        for path in (
            "/v1/chat/completions",
            "/v1/chat/completions?x=1",
            "//v1/chat/completions",
            "/v1/chat/completions/1",
        ):
            for host in ("localhost:1", "localhost:2"):
                get(guarded, path, "POST", Host=host, Content_Type="application/json", Content_Length="0")
        assert guarded.service.metrics_text().count(b"h2o_requests_total{") <= before + 1

    def test_allowed_pages_are_told_so(self, guarded: Running) -> None:
        page = {"Origin": "https://chat.example.org", "Sec_Fetch_Site": "cross-site"}
        asked = {
            "Access_Control_Request_Method": "POST",
            "Access_Control_Request_Headers": "authorization,content-type",
        }
        status, headers, _ = get(guarded, "/v1/chat/completions", "OPTIONS", **page, **asked)
        assert (status, headers["access-control-allow-origin"]) == (200, page["Origin"])
        assert get(guarded, "/v1/models", Authorization="Bearer one", **page)[1]["access-control-allow-origin"]
        assert get(guarded, "/v1/models", "OPTIONS", **{**page, "Origin": "https://evil.example"}, **asked)[0] == 403

    def test_a_refusal_says_what_to_do(self, guarded: Running) -> None:
        text = get(guarded, "/health", Host="chat.example.org")[2]
        assert "--allow-host chat.example.org" in json.loads(text)["error"]["message"]


SHORT = {"temperature": 0, "max_output_tokens": 4}


def respond(server: Running, key: str, said: Any, after: str | None = None, **more: Any) -> tuple[int, Any]:
    """Status and answer of a response."""
    return post(server.url, "/v1/responses", {"input": said, "previous_response_id": after, **SHORT, **more}, key)


@needs_library
class TestConversations:
    def test_ids_open_nothing_to_other_keys(self, guarded: Running) -> None:
        first = respond(guarded, "one", "The code is 4711.", instructions="Guess.")[1]
        assert respond(guarded, "one", "Which code?", first["id"])[0] == 200
        for instructions in (None, "Guess.", "Know."):
            assert respond(guarded, "two", "Which code?", first["id"], instructions=instructions)[0] == 404

    def test_the_same_words_open_nothing_to_other_keys(self, guarded: Running) -> None:
        begun = reply(guarded.say("Hello.", key="one"))
        guarded.say("Hello.", begun, "The code is 4711.", key="one")
        other = guarded.say("Hello.", begun, "Which code?", key="two")["h2o"]
        assert (other["origin"], other["turns_known"]) == ("read", 0)
        assert guarded.say("Hello.", begun, "Which code?", key="one")["h2o"]["turns_known"] == 1

    def test_what_is_said_later_is_not_shared(self, guarded: Running) -> None:
        """Two clients with one key, or none, share the first exchange; each has ids of its own for what follows."""
        first, second = (respond(guarded, "one", "Good day.")[1] for _ in range(2))
        assert first["id"] != second["id"]
        said = first["output"][0]["content"][0]["text"]
        history = [{"role": "user", "content": "Good day."}, {"role": "assistant", "content": said}]
        secret = respond(guarded, "one", [*history, {"role": "user", "content": "The code is 4711."}])[1]
        assert secret["h2o"]["turns_known"] == 1
        for mine in (first, second):
            found = respond(guarded, "one", "Which code?", mine["id"])[1]["h2o"]
            prompts = [entry.prompt for entry in guarded.entries(found["conversation"], found["turn"])]
            assert prompts == ["Good day.", "Which code?"]

    def test_ids_are_not_derived(self, guarded: Running) -> None:
        answer = respond(guarded, "one", "Name a river.")[1]
        number, turn = answer["h2o"]["conversation"], answer["h2o"]["turn"]
        assert number not in json.dumps({**answer, "h2o": None})
        for guess in (f"resp_{number}", f"resp_{number}_{turn}", f"resp_{number}_{turn + 1}", answer["id"] + "_2"):
            assert respond(guarded, "one", "Go on.", guess)[0] == 404

    def test_logs_have_no_ids(self, guarded: Running, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("DEBUG", "h2o_stream")
        answer = respond(guarded, "one", "Name a lake.")[1]
        respond(guarded, "one", "Another.", answer["id"])
        assert "conversation" in caplog.text
        assert not re.search("[0-9a-f]{24}|Name a lake", caplog.text)

    def test_ids_and_owners_outlive_the_server(self, guarded: Running) -> None:
        answer = respond(guarded, "two", "Name a hill.")[1]
        store, number = guarded.service.store, answer["h2o"]["conversation"]
        store.conversations[number].close()
        again = next(kept for kept in store._read() if kept.id == number)
        assert (again.owner, again.ids) == (store.conversations[number].owner, {answer["id"][5:]: 1})
        assert again.owner not in ("", "two")
