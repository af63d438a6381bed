"""An h2o-serve of the embedded model in a thread of the tests."""

import threading
import time
from pathlib import Path
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette

from h2o_stream.config import CacheConfig, ModelConfig, ServeConfig
from h2o_stream.serve.app import make_app
from h2o_stream.serve.connections import uvicorn_config
from h2o_stream.serve.requests import Options
from h2o_stream.serve.service import Service, load_served
from h2o_stream.session.transcript import Entry
from tests.serve_load import post

CACHE, MODEL = CacheConfig(window=64), ModelConfig(dtype="float32")


class Listening:
    """An application that is served in a thread."""

    def __init__(self, app: Starlette, limits: ServeConfig) -> None:
        self._server = uvicorn.Server(uvicorn_config(app, limits))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


class Running(Listening):
    """An h2o-serve in a thread."""

    def __init__(self, folder: Path, model: ModelConfig = MODEL, cache: CacheConfig = CACHE, **config: Any) -> None:
        limits = ServeConfig(folder=folder, port=0, **config)
        self.service = Service(load_served(model, cache), limits, Options(cache))
        super().__init__(make_app(self.service), limits)

    def ask(self, *messages: str, **more: Any) -> tuple[int, Any]:
        """Status and answer to messages of user and assistant in turn."""
        roles = ("user", "assistant")
        listed = [{"role": roles[number % 2], "content": text} for number, text in enumerate(messages)]
        return post(self.url, "/v1/chat/completions", {"messages": listed, "temperature": 0, "max_tokens": 8, **more})

    def entries(self, conversation: str, turn: int) -> list[Entry]:
        """The first turns of a conversation, as they are on disk."""
        store = self.service.store
        saved = store.saved(store.conversations[conversation], turn)
        return saved[1] if saved else []

    def say(self, *messages: str, **more: Any) -> Any:
        """The answer, which must be one."""
        status, answer = self.ask(*messages, **more)
        assert status == 200, answer
        return answer


def reply(answer: Any) -> str:
    """What was replied."""
    return str(answer["choices"][0]["message"]["content"])
