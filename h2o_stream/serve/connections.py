"""Connections: how uvicorn is set up, and clients that neither send a whole request nor read what they are sent."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from h2o_stream.config import ServeConfig

_log = logging.getLogger(__name__)

_SHUTDOWN_S = 5
"""Seconds that open connections have when the server stops."""

_MAX_MS = 2**31 - 1
"""What fits in an option of a socket."""


def uvicorn_config(app: Starlette, config: ServeConfig) -> uvicorn.Config:
    """The settings of a uvicorn server for the application."""
    return uvicorn.Config(
        app,
        config.host,
        config.port,
        http=_impatient(config.unread_s),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )


def _impatient(limit_s: float) -> type[asyncio.Protocol]:
    """Uvicorn's protocol, which gives a client up that leaves what it was sent unread for so long, or whose headers do
    not arrive in this time. The application has a limit for bodies, uvicorn one for silence between two requests.

    A reply waits in memory while its client reads slowly. Without a limit, clients that never read would hold replies,
    and places among those that may wait, for ever.
    """
    limit_ms = math.ceil(min(limit_s * 1000, _MAX_MS))

    class Impatient(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
        _timer: asyncio.TimerHandle | None = None
        _headers_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait_for_headers()
            connection = transport.get_extra_info("socket")
            if hasattr(socket, "TCP_USER_TIMEOUT") and connection.family != socket.AF_UNIX:  # also after the last write
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)

        def data_received(self, data: bytes) -> None:
            answered = self.cycle
            super().data_received(data)
            if self.cycle is not answered:
                self._stop_waiting_for_headers()
            elif self._headers_timer is None and answered.response_complete:
                self._wait_for_headers()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._timer = asyncio.get_running_loop().call_later(limit_s, self._give_up)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            self._stop_waiting_for_headers()
            if isinstance(exc, TimeoutError):
                self._log()
            super().connection_lost(exc)

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
