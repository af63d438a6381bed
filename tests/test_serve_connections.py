"""More connections than there is room for, logs, and the end of a server."""

import asyncio
import gc
import json
import logging
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.applications import Starlette

from h2o_stream.base import startup
from h2o_stream.config import ServeConfig
from h2o_stream.errors import ConfigError, DataError
from h2o_stream.serve import connections
from h2o_stream.serve.connections import bound, max_connections, raise_file_limit, uvicorn_config
from h2o_stream.session import server
from tests.native_builds import needs_library
from tests.serve_kill import Server
from tests.serve_load import post
from tests.waiting import wait_for

pytestmark = needs_library


def test_connections_leave_files_for_the_rest() -> None:
    assert 200 < max_connections(ServeConfig(), 1024) < 1024 - 3 * 64
    assert max_connections(ServeConfig(), 4096) - max_connections(ServeConfig(), 1024) == 3072
    with pytest.raises(ConfigError, match="ulimit"):
        max_connections(ServeConfig(), 256)
    assert max_connections(ServeConfig(awake=4, running=4), 256) > 0


def test_the_process_may_have_as_many_files_as_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
        assert raise_file_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[Server]:
    """A server with few descriptors, whose log is in its folder."""
    folder = tmp_path_factory.mktemp("small")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        options = ("-m", str(tiny_folder), "--window", "64", "--dtype", "float32", "--awake", "8", "--running", "8")
        with Server(folder / "served", *options, files=320) as server:
            yield server


def open_files(process: int) -> int:
    return len([*Path(f"/proc/{process}/fd").iterdir()])


def test_more_connections_than_files(small: Server) -> None:
    """They neither end the server, nor keep others out, nor fill the log; the oldest of those that wait is closed."""
    body = {"messages": [{"role": "user", "content": "Still there?"}], "max_tokens": 2}
    with ExitStack() as stack:
        for number in range(240):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", small.port), timeout=10))
            if number % 3:
                connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
            if number % 3 == 2:
                connection.sendall(b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
            if number % 80 == 79:
                assert small.is_healthy()
        assert post(small.url, "/v1/chat/completions", body)[0] == 200
        assert open_files(small.process.pid) < 320
    assert post(small.url, "/v1/chat/completions", body)[0] == 200
    (log,) = (small.folder.parent).rglob("h2o-stream.log")
    assert log.stat().st_size < 2**16


def test_a_log_is_private_and_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state" / "x.log"
    monkeypatch.setattr(startup, "log_file", lambda: path)
    monkeypatch.setattr(startup, "_MAX_LOG_BYTES", 1000)
    monkeypatch.setattr(logging.root, "handlers", [])
    path.parent.mkdir(mode=0o755)
    path.write_text("from an earlier version\n")
    path.chmod(0o644)
    startup._start_log()
    (handler,) = logging.root.handlers
    for number in range(200):
        logging.getLogger("x").warning("line %d", number)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {file.name for file in path.parent.iterdir()} == {"x.log", "x.log.1"}
    for file in path.parent.iterdir():
        assert file.stat().st_size < 1200
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "line 199" in path.read_text()
    handler.close()
    path.parent.chmod(0o500)
    for _ in range(2):  # it can neither be opened again nor moved, for root it can
        logging.getLogger("x").warning("more")
    path.parent.chmod(0o700)


def test_a_log_that_cannot_be_opened_again_stops_nobody(tmp_path: Path) -> None:
    """As after uvicorn had closed it, when there was no descriptor left."""
    code = (
        "import logging, os, resource, sys\n"
        "from h2o_stream.base import startup\n"
        f"startup.log_file = lambda: __import__('pathlib').Path({str(tmp_path / 'x.log')!r})\n"
        "startup._start_log()\n"
        "logging.root.handlers[-1].close()\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        "logging.getLogger('x').warning('lost')\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).stderr == b""


BOMB = {"type": "string", "allOf": [{"type": "string", "pattern": f"^.*(a|b){{{n}}}.*$"} for n in range(1, 40)]}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_everything_soon(
    tmp_path: Path, tiny_folder: Path, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the middle of a stream that nobody reads, of a schema without an end, and of half a request. Those that wait
    get an error, and the log has no traceback.
    """
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": BOMB}}
    with (
        Server(tmp_path, "-m", str(tiny_folder), "--window", "64", "--dtype", "float32") as server,
        ExitStack() as stack,
    ):
        connections = []
        for more, missing in (({"stream": True, "max_tokens": 2000}, 0), ({"response_format": schema}, 0), ({}, 1)):
            body = json.dumps({"messages": [{"role": "user", "content": "Write."}], **more}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body) + missing}\r\n"
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 10))
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            connections.append(connection)
        upgraded = socket.create_connection(("127.0.0.1", server.port), 10)
        stack.enter_context(upgraded).sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
                                              b"Connection: Upgrade\r\n\r\n")  # fmt: skip
        assert upgraded.recv(2**16).startswith(b"HTTP/1.1 200 ")
        connections[0].recv(1)
        wait_for(psutil.Process(server.process.pid).children)
        server.process.send_signal(number)
        assert server.process.wait(10) == 128 + number
        for connection in connections[1:]:
            answer = connection.recv(2**16)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"the server is stopping" in answer
    log = capfd.readouterr().err
    assert "Traceback" not in log
    assert "pip install" not in log


def test_a_port_of_others_is_refused_and_a_free_one_is_named() -> None:
    (free,) = bound(ServeConfig(port=0))
    with free:
        free.listen()
        config = ServeConfig(port=free.getsockname()[1])
        with pytest.raises(DataError, match=r"--host 127\.0\.0\.1 --port \d+: Address already in use"):
            bound(config)
    with pytest.raises(DataError, match=r"--host 192\.0\.2\.1 --port 8000: "):
        bound(ServeConfig(host="192.0.2.1", allow_anyone=True))


def test_keys_in_a_file(tmp_path: Path) -> None:
    """A mark of its encoding is no part of a key, and a device is not read to its end, which it has not."""
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbfone\r\n# none\n\xc3\xa9 x\n")
    assert ServeConfig(api_key_file=tmp_path / "keys").api_keys == ("one", "\xe9 x")
    with pytest.raises(ConfigError, match="--api-key-file /dev/zero has more than"):
        ServeConfig(api_key_file=Path("/dev/zero"))


UNSENDABLE = [" qz", "qz ", "q\tz", "q\x0bz", "q\x85z", "q\u2028z", "qz\x7f", "qz\0", "qz\udcff", "\t", "qz\n"]


@pytest.mark.parametrize("key", UNSENDABLE)
def test_keys_that_no_client_can_send(tmp_path: Path, key: str) -> None:
    """None is taken for another one. The message names where it is, and not the key."""
    file = tmp_path / "keys"
    file.write_bytes(f"one\n{key}\n".encode("utf-8", "surrogateescape"))
    sources: dict[str, dict[str, Any]] = {"--api-key or H2O_API_KEY": {"api_key": key}}
    if key.strip() and "\n" not in key:
        sources[f"--api-key-file {file}, line 2,"] = {"api_key_file": file}
    for source, config in sources.items():
        with pytest.raises(ConfigError) as error:
            ServeConfig(**config)
        assert str(error.value).startswith(source)
        assert len(str(error.value).splitlines()) == 1
        assert key not in str(error.value).removeprefix(source)
    with pytest.raises(ConfigError, match="--api-key"):
        server.Server("localhost:1", key)


async def listening() -> connections.Server:
    """A server that accepts connections in this event loop."""
    config = uvicorn_config(Starlette(), ServeConfig(port=0))
    config.load()
    server = connections.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    return server


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says how many connections may wait")
def test_many_connections_may_wait() -> None:
    """Beyond them, a client would try again after a second."""

    async def waiting() -> int:
        server = await listening()
        (accepting,) = server.servers[0].sockets
        state = accepting.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
        server.servers[0].close()
        return int.from_bytes(state[28:32], sys.byteorder)

    assert asyncio.run(waiting()) >= 1024


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps silent connections from the server")
def test_a_client_that_says_nothing_costs_nothing() -> None:
    """A thousand idle connections a second would take half of a processor."""

    async def seen() -> tuple[int, int]:
        server = await listening()
        silent, speaking = [await asyncio.open_connection(*address(server)) for _ in range(2)]
        speaking[1].write(b"G")
        while not server.server_state.connections:
            await asyncio.sleep(0.01)
        counts = len(server.server_state.connections), server.servers[0]._active_count
        for _, writer in (silent, speaking):
            writer.close()
        server.servers[0].close()
        return counts

    assert asyncio.run(seen()) == (1, 1)


@pytest.mark.skipif(not hasattr(socket, "TCP_DEFER_ACCEPT"), reason="the system does not wait for what they send")
def test_connections_that_have_sent_nothing_for_long_are_not_taken() -> None:
    """A thousand of them at once would keep others waiting."""
    (accepting,) = bound(ServeConfig(host="127.0.0.1", port=0))
    with accepting, ExitStack() as stack:
        accepting.listen()
        silent, speaking, gone = (stack.enter_context(socket.create_connection(accepting.getsockname())) for _ in "123")
        gone.close()
        speaking.sendall(b"GET")
        taken, address = accepting.accept()
        with taken:
            assert address == speaking.getsockname()
        with pytest.raises(BlockingIOError):
            accepting.accept()
        silent.settimeout(60)
        assert silent.recv(1) == b""


def address(server: connections.Server) -> tuple[str, int]:
    """Where it listens."""
    host, port = server.servers[0].sockets[0].getsockname()
    return host, port


def post_body(data: bytes, is_read: Callable[[], bool]) -> None:
    """Send a header and a body, and wait until a server has read them."""

    async def sent() -> None:
        server = await listening()
        _, writer = await asyncio.open_connection(*address(server))
        writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\n" + data)
        while not is_read():
            await asyncio.sleep(0.01)
        writer.close()
        server.servers[0].close()

    asyncio.run(sent())


def test_small_chunks_are_read_in_turn_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a megabyte of them, which is what a connection gives at once, takes seconds."""
    events, handle = list[int](), connections.H11Protocol.handle_events

    def counting(protocol: connections.H11Protocol) -> None:
        number, take = len(events), protocol.conn.next_event
        events.append(0)

        def counted() -> object:
            events[number] += 1
            return take()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(protocol.conn, "next_event", counted)
            handle(protocol)

    monkeypatch.setattr(connections.H11Protocol, "handle_events", counting)
    post_body(b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 20_000, lambda: sum(events) >= 20_000)
    assert max(events) < 500


def test_a_body_in_one_piece_is_read_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of two kilobytes would take the event loop's time from others."""
    sizes, receive = list[int](), connections.H11Protocol.data_received

    def counting(protocol: connections.H11Protocol, data: bytes) -> None:
        sizes.append(len(data))
        receive(protocol, data)

    monkeypatch.setattr(connections.H11Protocol, "data_received", counting)
    post_body(b"Content-Length: 1000000\r\n\r\n" + b" " * 1_000_000, lambda: sum(sizes) >= 1_000_000)
    assert len(sizes) < 100
    assert max(sizes) <= connections._BODY_BYTES


@pytest.mark.parametrize("resets", [False, True])
def test_a_closed_connection_is_no_garbage(resets: bool) -> None:
    """Its collection would stop all threads, for tenths of a second after some thousand connections. One that its
    client has reset is not kept until it would have been silent for too long, either.
    """

    async def left() -> int:
        server = await listening()
        _, writer = await asyncio.open_connection(*address(server))
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while not (made := [weakref.ref(each) for each in server.server_state.connections if each.cycle]):
            await asyncio.sleep(0.01)
        while not made[0]().cycle.response_complete:
            await asyncio.sleep(0.01)
        if resets:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport = weakref.ref(made[0]().transport)
        gc.collect()
        gc.disable()
        try:
            writer.close()
            while server.server_state.connections:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            return sum(each() is not None for each in (*made, transport))
        finally:
            gc.enable()
            server.servers[0].close()

    assert asyncio.run(left()) == 0
