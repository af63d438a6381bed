"""``h2o-serve``: endless conversations behind the interface of OpenAI."""

from __future__ import annotations

import gc
import logging
import sys
from typing import Any

from h2o_stream.base.options import Option, parse_bytes
from h2o_stream.cli import run
from h2o_stream.cli.groups import Group
from h2o_stream.cli.options import CACHE, MODEL, OUTPUT, RECALL, OutputOptions
from h2o_stream.config import CHAT_RECALL, CacheConfig, ModelConfig, RecallMode, ServeConfig

app = run.app("H2O")

_SWITCH_S = 0.0005
"""Seconds after which a thread that waits for Python gets it: replies wait for it many times in a step."""

_GARBAGE = 5_000, 20, 50
"""Thresholds of garbage collection, during which all threads wait: conversations end without it, and little is left."""


def _serve_config(
    disk: str = "8GiB",
    max_body: str = "4MiB",
    allow_host: list[str] = [],  # noqa: B006 - typer's default
    allow_origin: list[str] = [],  # noqa: B006
    **values: Any,
) -> ServeConfig:
    return ServeConfig(
        disk=parse_bytes(disk, "--disk"),
        max_body=parse_bytes(max_body, "--max-body"),
        allow_host=tuple(allow_host),
        allow_origin=tuple(allow_origin),
        **values,
    )


SERVER = Group(
    _serve_config,
    "Server",
    like=ServeConfig,
    host=Option("Address to listen on; 0.0.0.0 lets other machines in, with a key."),
    port=Option("Port to listen on; 0 takes a free one."),
    api_key=Option("Clients must send this key. Others can read it in the list of processes: better H2O_API_KEY."),
    api_key_file=Option("Or one of the keys in this file, one a line; each has its own conversations."),
    allow_anyone=Option("Let other machines in without a key.", "--allow-anyone"),
    allow_host=Option("Name of this server behind a proxy, as in the Host of requests; repeated for more."),
    allow_origin=Option("Pages that may use it, such as https://chat.example.org; repeated for more."),
    folder=Option("Where conversations are kept. (default: the user's data folder)"),
    awake=Option("Conversations in memory; the others sleep on disk."),
    running=Option("Replies made at once."),
    waiting=Option("Requests that may wait; beyond them the answer is 429."),
    states=Option("Last turns of a conversation to which a request can return."),
    disk=Option("Bytes of all conversations; the least recently used go first."),
    expiry_days=Option("Forget what was not used for so many days."),
    max_body=Option("Bytes of a request."),
    max_reply=Option("Tokens of a reply at most."),
    timeout_s=Option("Seconds of a reply at most."),
    speculate=Option("Guess tokens from what was said before, while one reply is made; replies are the same."),
    strict=Option("Refuse requests that name another model, or have unknown fields.", "--strict"),
    unread_s=Option("Disconnect clients that do not read, or send, for so many seconds."),
)


def _conversation(recall: RecallMode = CHAT_RECALL, think: bool | None = None) -> tuple[RecallMode, bool | None]:
    return recall, think


CONVERSATION = Group(
    _conversation,
    "Conversation",
    recall=RECALL,
    think=Option("Let the model think or not. (default: the template's)", "--think/--no-think"),
)


@run.command(app, "h2o-serve", SERVER, MODEL, CACHE, CONVERSATION, OUTPUT)
def serve(
    config: ServeConfig,
    model: ModelConfig,
    cache: CacheConfig,
    conversation: tuple[RecallMode, bool | None],
    output: OutputOptions,
) -> None:
    """Serve a model to any client of OpenAI's API, with endless conversations in constant memory."""
    level = logging.WARNING if output.quiet else logging.INFO
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("h2o_stream").setLevel(logging.DEBUG if output.verbose else level)
    with run.outputs(output) as (terminal, _):
        with run.loading(model, terminal):
            from h2o_stream.serve.app import make_app
            from h2o_stream.serve.connections import Server, bound, uvicorn_config
            from h2o_stream.serve.requests import Options
            from h2o_stream.serve.service import Service, load_served
        sockets = bound(config)
        service = Service(load_served(model, cache), config, Options(cache, *conversation))
        gc.collect()
        gc.freeze()  # only what requests have made is collected
        gc.set_threshold(*_GARBAGE)
        sys.setswitchinterval(_SWITCH_S)
        host, port = f"[{config.host}]" if ":" in config.host else config.host, sockets[0].getsockname()[1]
        address = f"http://{host}:{port}"
        terminal.note(f"Serving {service.name} on {address}/v1, and a page at {address}", style="dim")
        try:
            Server(uvicorn_config(make_app(service), config)).run(sockets)
        except SystemExit as left:  # a signal; all is saved
            run.end_process(left.code)


def main() -> None:
    """Entry point."""
    run.main("h2o-serve", app)
