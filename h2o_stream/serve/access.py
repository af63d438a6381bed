"""Who may use the server: clients by their key, and pages of browsers only if they are its own or allowed.

Any page that a user visits can send requests to servers on the user's machine. A browser says where a request comes
from (`Origin`, `Sec-Fetch-Site`), and asks before it sends JSON. A page whose name its owner lets point to this machine
(DNS rebinding) comes from the same origin for the browser, but the `Host` has that name.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import socket
from collections.abc import Sequence
from functools import cached_property
from ipaddress import ip_address
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from h2o_stream.config import ServeConfig
from h2o_stream.serve.errors import ApiError, stopping

_ANY = "*"
"""In place of a host or an origin: all of them."""

_PLACE = re.compile(
    r"(?:(?P<scheme>[a-z][a-z0-9+.-]*)://)?(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+|\*)(?::(?P<port>\d{1,5}))?", re.ASCII
)

_ABSOLUTE = re.compile(rb"https?://([^/]*)(/.*)?", re.IGNORECASE | re.DOTALL)

_SCHEME = re.compile(r"\Abearer +", re.IGNORECASE)

_PORTS = {"http": 80, "https": 443}


class Access:
    """What a server lets in.

    Args:
        config: configuration of the server.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._keys = [key.encode() for key in config.api_keys]
        self._hosts, self._origins = {_place(host)[0] for host in config.allow_host}, {*config.allow_origin}
        self._host, self._open = config.host.lower(), not config.on_loopback

    def owner(self, headers: Headers) -> str:
        """Names the key of a request, to whom its conversations belong; nothing if the server has no keys.

        Raises:
            ApiError: the key is missing or wrong.
        """
        if not self._keys:
            return ""
        sent = _SCHEME.sub("", headers.get("authorization", "")).encode("latin-1")
        keys = [key for key in self._keys if hmac.compare_digest(sent, key)]
        if not keys:
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        return hashlib.sha256(b"h2o-serve " + keys[0]).hexdigest()[:32]

    def check(self, scope: Scope) -> None:
        """Refuse what a page of somebody else sends.

        Raises:
            ApiError: it may be that.
        """
        headers = Headers(scope=scope)
        hosts, origin = headers.getlist("host"), headers.get("origin")
        if len(hosts) > 1 or any(not self._is_known(host, scope) for host in hosts):
            name = _printable(", ".join(hosts))
            raise ApiError(403, f"this server is not known as {name}; start it with --allow-host {name}", code="host")
        if origin is not None:
            if not self._may_ask(origin, hosts):
                name = _printable(origin)
                message = f"pages of {name} may not use this server; start it with --allow-origin {name}"
                raise ApiError(403, message, code="origin")
        elif headers.get("sec-fetch-site") == "cross-site" and not _is_link(scope, headers):
            raise ApiError(403, "pages of others may not use this server", code="origin")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            raise ApiError(415, "send JSON, and the header Content-Type: application/json", code="content_type")

    def _may_ask(self, origin: str, hosts: Sequence[str]) -> bool:
        if self._origins & {origin, _ANY}:
            return True
        scheme, separator, _ = origin.partition("://")
        return bool(hosts and separator) and _place(origin) == _place(hosts[0], scheme)

    def _is_known(self, host: str, scope: Scope) -> bool:
        """Whether a server is called so: no name of somebody else may point to it."""
        name, _ = _place(host)
        if not name or "://" in host:
            return False
        if {name, _ANY} & self._hosts or name in self._names or name.endswith(".localhost"):
            return True
        try:
            address = ip_address(name)
        except ValueError:
            return False
        # No browser takes an address for the name of a page from elsewhere. Behind Docker's port, it is not our own.
        return self._open or address.is_loopback or name == (scope.get("server") or ("",))[0]

    @cached_property
    def _names(self) -> set[str]:
        """Of this machine."""
        own = socket.gethostname().lower()
        short = own.partition(".")[0]
        return {"localhost", self._host, own, short, f"{short}.local"} - {""}


class Gate:
    """An application behind the checks of `Access`. A request that waits when the server stops gets an error."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refused request with its error, and pass on all others."""
        if scope["type"] == "http":
            scope = _origin_form(scope)
            try:
                self._access.check(scope)
            except ApiError as error:
                await _refuse(error, scope, receive, send)
                return
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            if started:
                raise
            await _refuse(stopping(), scope, receive, send)


def _origin_form(scope: Scope) -> Scope:
    """The same request by its path, if it has an absolute target; whose authority replaces `Host` (RFC 9112, 3.2.2)."""
    if (match := _ABSOLUTE.fullmatch(scope.get("raw_path", b""))) is None:
        return scope
    path, headers = match[2] or b"/", [(name, value) for name, value in scope["headers"] if name != b"host"]
    return {**scope, "path": unquote(path), "raw_path": path, "headers": [(b"host", match[1]), *headers]}


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse(error.body(), error.status)(scope, receive, send)


def _place(text: str, scheme: str = "") -> tuple[str, int]:
    """Name, without a dot at its end, and port of a host or an origin, the port of the scheme if it has none; nothing
    if it is neither.
    """
    match = _PLACE.fullmatch(text.lower())
    if match is None:
        return "", 0
    name = match["name"].strip("[]").removesuffix(".")
    return name, int(match["port"] or _PORTS.get(match["scheme"] or scheme, 0))


def _is_link(scope: Scope, headers: Headers) -> bool:
    """Whether somebody has followed a link to the page."""
    return scope["method"] == "GET" and scope["path"] == "/" and headers.get("sec-fetch-mode") == "navigate"


def _printable(name: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in name[:100])
