"""A Hub on this machine."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BODY = b"GGUF" + bytes(1_000_000)
FILE = {"ETag": '"1"', "X-Repo-Commit": "0" * 40, "Content-Length": str(len(BODY))}

REFUSALS: dict[str, tuple[int, dict[str, str]]] = {
    "org/gated": (403, {"X-Error-Code": "GatedRepo"}),
    "org/unknown": (404, {"X-Error-Code": "RepoNotFound"}),
    "org/private": (401, {"X-Error-Code": "RepoNotFound"}),
    "org/no-model": (404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": "a" * 40}),
}
"""One repository for each kind of failure; all others have every file."""


class Hub(BaseHTTPRequestHandler):
    def answer(self) -> tuple[int, dict[str, str]]:
        return REFUSALS.get("/".join(self.path.split("/")[1:3]), (200, FILE))

    def do_HEAD(self) -> None:
        status, headers = self.answer()
        self.send_response(status)
        for name, value in ({"Content-Length": "0"} | headers).items():
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        if self.answer()[0] == 200:
            self.wfile.write(BODY)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving_hub() -> Iterator[str]:
    """The address of a Hub."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
