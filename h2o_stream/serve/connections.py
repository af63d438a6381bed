"""Connections: how uvicorn is set up, how many there may be, and clients that neither send a whole request nor read
what they are sent.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, ClassVar

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from h2o_stream.base.stdio import handle_termination
from h2o_stream.config import ServeConfig
from h2o_stream.errors import ConfigError, DataError

_log = logging.getLogger(__name__)

_SILENT_S = 10
"""How long the system keeps connections that send nothing, before the server sees them."""

_SHUTDOWN_S, _EXIT_S = 0.3, 1.5
"""Seconds that open connections have when the server stops, and after which the process ends whatever it does: what
was finished is on disk.
"""

_BACKLOG, _QUEUE = 64, 4096
"""Connections that are accepted at once, before the first of them is looked at; and that wait for it in the system,
which makes a client try again after a second if there are more.
"""

_SILENT = 512
"""Connections without a byte that are closed at once, which takes 10 ms."""

_SESSION_FILES, _OTHER_FILES, _MAX_FILES = 5, 64, 2**16
"""Descriptors of a conversation in memory with its grammar, those of everything else, and how many are asked for."""

_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""What a client that still waits passes over, and one that has left does not take."""

_PROBE_S = 0.25
"""Seconds after which a client that sends nothing more is asked for the second time; then twice as many each time."""

_MAX_MS = 2**31 - 1
"""What fits in an option of a socket."""

_READ_BYTES, _BODY_BYTES = 2**11, 2**16
"""What is read of a connection before others have their turn, and of a body in one piece: each chunk of others takes as
long, if it is a byte.
"""


class Server(uvicorn.Server):
    """Ends soon after a signal, whatever its threads do."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        for listening in (each for server in self.servers for each in server.sockets):
            with socket.socket(fileno=os.dup(listening.fileno())) as same:
                same.listen(_QUEUE)
                if hasattr(socket, "TCP_DEFER_ACCEPT"):  # a connection that sends nothing never reaches the server
                    same.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_S)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Shut down at SIGHUP, too: an exception anywhere in the event loop would end a request only."""
        with super().capture_signals():
            previous = handle_termination(lambda number: self.handle_exit(number, None))
            try:
                yield
            finally:
                for number, handler in previous.items():
                    signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down, and end the process if that takes too long."""
        timer = threading.Timer(_EXIT_S, os._exit, [128 + sig])
        timer.daemon = True
        timer.start()
        super().handle_exit(sig, frame)


class _Listening(socket.socket):
    """Accepts connections that have sent something: where the system waits for that, it has waited long for others.

    Others are closed by calls that keep Python: each of a thousand would wait for threads that compute replies.
    """

    _system = ctypes.PyDLL(None, use_errno=True)

    def accept(self) -> tuple[socket.socket, Any]:
        """The next of them.

        Raises:
            BlockingIOError: it has not come yet, or many others came before it.
        """
        if not hasattr(socket, "TCP_DEFER_ACCEPT"):
            return super().accept()
        byte = ctypes.create_string_buffer(1)
        for _ in range(_SILENT):
            number = self._system.accept4(self.fileno(), None, None, socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            if number < 0:
                raise OSError(code := ctypes.get_errno(), os.strerror(code))
            if self._system.recv(number, byte, 1, socket.MSG_PEEK) > 0:
                connection = socket.socket(self.family, self.type, self.proto, fileno=number)
                with suppress(OSError):  # it is gone
                    return connection, connection.getpeername()
                connection.close()
            else:
                self._system.close(number)
        raise BlockingIOError


def raise_file_limit() -> int:
    """Allow the process as many descriptors as the system lets it have. Returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _MAX_FILES if soft == resource.RLIM_INFINITY else soft


def max_connections(config: ServeConfig, files: int) -> int:
    """How many connections leave the others the descriptors that they need.

    Args:
        config: configuration of the server.
        files: descriptors of the process.

    Raises:
        ConfigError: there are too few.
    """
    needed = _BACKLOG + _OTHER_FILES + _SESSION_FILES * config.awake
    if files < needed + _BACKLOG:
        raise ConfigError(
            f"this process may have {files} open files, and --awake {config.awake} needs {needed + _BACKLOG}; "
            "allow more (ulimit -n), or keep fewer awake"
        )
    return files - needed


def bound(config: ServeConfig) -> list[socket.socket]:
    """Sockets at the server's addresses, with the same port.

    Raises:
        DataError: another program has it, or there is no such address.
    """
    port, sockets = config.port, list[socket.socket]()
    try:
        for family, kind, protocol, _, place in dict.fromkeys(
            socket.getaddrinfo(config.host, port, type=socket.SOCK_STREAM)
        ):
            sockets.append(_Listening(family, kind, protocol))
            sockets[-1].setblocking(False)
            sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sockets[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sockets[-1].bind((place[0], port, *place[2:]))
            port = sockets[-1].getsockname()[1]
    except OSError as error:
        raise DataError(f"--host {config.host} --port {port}: {error.strerror or error}") from error
    return sockets


def uvicorn_config(app: Starlette, config: ServeConfig) -> uvicorn.Config:
    """The settings of a uvicorn server for the application.

    Raises:
        ConfigError: the process may have too few open files.
    """
    limit = max_connections(config, raise_file_limit())
    logging.getLogger("uvicorn.error").addFilter(_is_trouble)
    return uvicorn.Config(
        app,
        config.host,
        config.port,
        http=_impatient(config.unread_s, limit),
        ws="none",
        log_config=None,  # it would close the log
        access_log=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=_SHUTDOWN_S,  # type: ignore[arg-type]  # asyncio takes parts of seconds
    )


def _is_trouble(record: logging.LogRecord) -> bool:
    """Whether a record is no traceback of a request that is cut off because the server stops."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _impatient(limit_s: float, max_connections: int) -> type[asyncio.Protocol]:
    """Uvicorn's protocol, which gives a client up that leaves what it was sent unread for so long, or whose headers do
    not arrive in this time. The application has a limit for bodies, uvicorn one for silence between two requests.

    A reply waits in memory while its client reads slowly. Without a limit, clients that never read would hold replies,
    and places among those that may wait, for ever.

    A client that has ended its side of the connection may still wait for its answer, or have left.

    There are so many connections at most. A new one takes the place of the oldest over which no request has arrived, or
    whose client does not read.
    """
    limit_ms = math.ceil(min(limit_s * 1000, _MAX_MS))

    class Impatient(H11Protocol):
        _open: ClassVar[dict[Impatient, None]] = {}
        _refused = _half_closed = False
        _timer: asyncio.TimerHandle | None = None
        _headers_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            if len(self._open) >= max_connections and not self._make_room():
                self._refused = True
                transport.write(_BUSY)
                transport.close()
                return
            self._open[self] = None
            transport.max_size = _READ_BYTES  # of asyncio's transports
            super().connection_made(transport)
            self._wait_for_headers()
            connection = transport.get_extra_info("socket")
            if hasattr(socket, "TCP_USER_TIMEOUT") and connection.family != socket.AF_UNIX:  # also after the last write
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            answered = self.cycle
            super().data_received(data)
            if self.cycle is not answered:
                self._stop_waiting_for_headers()
                names = dict(self.headers).keys()
                transport: Any = self.transport
                transport.max_size = _READ_BYTES if b"transfer-encoding" in names else _BODY_BYTES
                if {b"content-length", b"transfer-encoding"} <= names:
                    self.cycle.keep_alive = False  # a proxy may see another request in its body (RFC 9112, 6.1)
            elif self._headers_timer is None and answered.response_complete:
                self._wait_for_headers()

        def eof_received(self) -> bool:  # type: ignore[override]
            cycle = self.cycle
            if self._refused or not cycle or cycle.more_body or cycle.response_complete:
                return False
            if cycle.scope["method"] == "POST":  # other answers take no time
                if cycle.scope["http_version"] == "1.0":
                    return False  # it does not know what asks it
                self._probe(cycle, _PROBE_S)
            self._half_closed = True
            return True

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._half_closed and self.cycle.response_complete:
                self.transport.close()

        def send_400_response(self, msg: str) -> None:
            """Nothing more can be sent if the answer has begun."""
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                super().send_400_response(msg)
            else:
                self.transport.close()

        def _unsupported_upgrade_warning(self) -> None:
            """Answer as if no upgrade were asked for; uvicorn advises to install packages, at each request."""

        def pause_writing(self) -> None:
            super().pause_writing()
            self._timer = asyncio.get_running_loop().call_later(limit_s, self._give_up)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._refused:
                return
            self._open.pop(self, None)
            self._stop_timer()
            self._stop_waiting_for_headers()
            if isinstance(exc, TimeoutError):
                self._log()
            super().connection_lost(exc)
            self._unset_keepalive_if_required()  # also after a reset
            # its reference to itself, which would keep it until garbage is collected
            getattr(self.transport, "__dict__", {}).pop("_read_ready_cb", None)

        def _make_room(self) -> bool:
            """Close the oldest connection that waits for its client. False if there is none."""
            waiting = (x for x in self._open if not x.cycle or x.cycle.more_body or x.cycle.response_complete)
            oldest = next(waiting, None) or next((x for x in self._open if x._timer is not None), None)
            if oldest is None:
                return False
            del self._open[oldest]
            oldest.transport.abort()
            return True

        def _probe(self, cycle: RequestResponseCycle, seconds: float) -> None:
            """Write to a client that has not been answered: if it has left, the next write fails."""
            if not (cycle.response_started or cycle.disconnected or self.transport.is_closing()):
                self.transport.write(_CONTINUE)
                asyncio.get_running_loop().call_later(seconds, self._probe, cycle, 2 * seconds)

        def _give_up(self) -> None:
            self._log()
            self.transport.abort()

        def _wait_for_headers(self) -> None:
            self._headers_timer = asyncio.get_running_loop().call_later(limit_s, self.transport.abort)

        def _stop_waiting_for_headers(self) -> None:
            if self._headers_timer is not None:
                self._headers_timer.cancel()
                self._headers_timer = None

        def _log(self) -> None:
            _log.warning("a client left its reply unread for %g s and was disconnected", limit_s)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Impatient
