"""Downloads from a local Hub, and their progress messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from h2o_stream.models.hub import download_bars, fetch
from h2o_stream.progress import Progress

BODY = b"GGUF" + bytes(1_000_000)


class Hub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(200)
        for name, value in (("ETag", '"1"'), ("X-Repo-Commit", "0" * 40), ("Content-Length", str(len(BODY)))):
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(BODY)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/{filename}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield
    server.shutdown()
    server.server_close()


def test_a_download_tells_its_bytes_and_draws_nothing(hub: None, capfd: pytest.CaptureFixture[str]) -> None:
    heard: list[Progress] = []
    assert fetch("org/name", "m.gguf", False, heard.append).read_bytes() == BODY
    assert heard[-1] == Progress("downloading", len(BODY), len(BODY))
    assert capfd.readouterr().err == ""


def test_bars_are_summed_and_others_ignored() -> None:
    heard: list[Progress] = []
    bar = download_bars(heard.append)
    with bar(total=100, unit="B") as one, bar(total=50, unit="B") as two, bar(total=7) as files:
        one.update(30)
        two.update(50)
        files.update(7)
    assert heard[-1] == Progress("downloading", 80, 150)


def test_a_listener_can_stop_it(hub: None) -> None:
    def leave(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("org/name", "m.gguf", False, leave)
