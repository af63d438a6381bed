"""An h2o-serve in a thread of the tests."""

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self

import openai
import pytest
import uvicorn
from starlette.applications import Starlette
from transformers import PreTrainedTokenizerBase

from h2o_stream.config import CacheConfig, ModelConfig, ServeConfig
from h2o_stream.serve.app import make_app
from h2o_stream.serve.connections import uvicorn_config
from h2o_stream.serve.requests import Options
from h2o_stream.serve.service import Service, load_served
from h2o_stream.session.transcript import Entry
from tests.fixtures import make_llama, saved
from tests.serve_load import post
from tests.waiting import wait_for

CACHE, MODEL = CacheConfig(window=64), ModelConfig(dtype="float32")


@pytest.fixture(scope="module")
def impatient_server(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> "Iterator[Running]":
    """A server that soon gives up clients that do not read. A module calls it `server`."""
    with Running(tmp_path_factory.mktemp("served"), tiny_folder, unread_s=1.5) as running:
        yield running


@pytest.fixture(autouse=True)
def goes_on(server: "Running") -> Iterator[None]:
    """After each test of a module that has it, its server is as before."""
    yield
    server.check_idle()


class Listening:
    """An application that is served in a thread."""

    def __init__(self, app: Starlette, limits: ServeConfig) -> None:
        self._server = uvicorn.Server(uvicorn_config(app, limits))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        wait_for(lambda: self._server.started)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def connect(self, timeout_s: float = 60) -> closing[http.client.HTTPConnection]:
        """A connection, which is closed at the end of the block."""
        return closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


def connected(server: Listening, body: bytes, missing: int = 0) -> socket.socket:
    """A connection with small buffers, over which a request was sent but for its last bytes."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body) + missing}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


class Running(Listening):
    """An h2o-serve of the model in a folder, or of the embedded one."""

    def __init__(
        self, folder: Path, model: Path | ModelConfig = MODEL, cache: CacheConfig = CACHE, **config: Any
    ) -> None:
        limits = ServeConfig(folder=folder, port=0, **config)
        loading = ModelConfig(str(model), dtype="float32") if isinstance(model, Path) else model
        self.service = Service(load_served(loading, cache), limits, Options(cache))
        super().__init__(make_app(self.service), limits)

    def client(self) -> Any:
        """The openai package, connected to it."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def ask(self, *messages: str, key: str = "", **more: Any) -> tuple[int, Any]:
        """Status and answer to messages of user and assistant in turn, with a key."""
        roles = ("user", "assistant")
        listed = [{"role": roles[number % 2], "content": text} for number, text in enumerate(messages)]
        body = {"messages": listed, "temperature": 0, "max_tokens": 8, **more}
        return post(self.url, "/v1/chat/completions", body, key)

    def entries(self, conversation: str, turn: int) -> list[Entry]:
        """The first turns of a conversation, as they are on disk."""
        store = self.service.store
        saved = store.saved(store.conversations[conversation], turn)
        return saved[1] if saved else []

    def check_idle(self) -> None:
        """After each fault it answers, and nothing is left of the reply that failed."""
        self.say("Are you there?")
        worker, conversations = self.service.worker, self.service.conversations
        assert worker._thread.is_alive()
        wait_for(lambda: not (worker._jobs or worker._endings.saving or conversations.busy or self.service.active))

    def say(self, *messages: str, **more: Any) -> Any:
        """The answer, which must be one."""
        status, answer = self.ask(*messages, **more)
        assert status == 200, answer
        return answer


def reply(answer: Any) -> str:
    """What was replied."""
    return str(answer["choices"][0]["message"]["content"])


@contextmanager
def serving(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase, context: int = 800
) -> Iterator[Running]:
    """A server of a random model with this tokenizer."""
    model = saved(make_llama(vocab=len(tokenizer), context=context), tokenizer, tmp_path_factory.mktemp("model"))
    with Running(tmp_path_factory.mktemp("served"), model, CacheConfig(window=300)) as running:
        yield running
