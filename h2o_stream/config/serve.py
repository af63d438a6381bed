"""Settings of ``h2o-serve``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path

from h2o_stream.config.speculation import SpeculateMode
from h2o_stream.errors import ConfigError, file_errors

_MAX_KEYS = 2**20
"""Bytes of a file of keys that are read: devices have no end."""


@dataclass(frozen=True)
class ServeConfig:
    """What ``h2o-serve`` serves, to whom, and within which limits.

    Args:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        api_key: clients must send it as ``Authorization: Bearer``; None lets everybody in.
        api_key_file: has such keys, one a line. Conversations belong to the key that began them.
        allow_anyone: let other machines in without a key.
        allow_host: further names of this server, as requests have them in ``Host``; ``*`` is all.
        allow_origin: pages that may use it beside its own, as ``Origin`` has them; ``*`` is all.
        folder: folder of the conversations; None is in the user's data folder.
        awake: conversations whose caches are in memory; the others sleep on disk.
        running: replies generated at once.
        waiting: requests that may wait for that; others are refused with status 429.
        states: last turns of a conversation to which a request can return.
        disk: bytes of all conversations; beyond them the least recently used are forgotten.
        expiry_days: a conversation that was not used for so long is forgotten.
        max_body: bytes of a request.
        max_reply: tokens of a reply at most, and if the request names no limit.
        timeout_s: seconds of a reply; then it ends as if its length were reached.
        strict: refuse requests that name another model, or have fields that nobody documents; else the log names them.
        speculate: whether tokens of a reply that is made alone are guessed from what was said before.
        unread_s: seconds that a client may leave what it was sent unread, or take to send a request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    api_key_file: Path | None = None
    allow_anyone: bool = False
    allow_host: tuple[str, ...] = ()
    allow_origin: tuple[str, ...] = ()
    folder: Path | None = None
    awake: int = 64
    running: int = 64
    waiting: int = 256
    states: int = 3
    disk: int = 8 * 2**30
    expiry_days: float = 30.0
    max_body: int = 4 * 2**20
    max_reply: int = 2048
    timeout_s: float = 600.0
    unread_s: float = 30.0
    strict: bool = False
    speculate: SpeculateMode = "auto"

    def __post_init__(self) -> None:
        minima = {"port": 0, "awake": 1, "running": 1, "waiting": 0, "states": 1, "max_reply": 1}
        for name, minimum in minima.items():
            value, limit = getattr(self, name), 2**16 if name == "port" else 2**31
            if not minimum <= value < limit:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{name} is {value}; {option} must be at least {minimum}, and below {limit}")
        for name in ("expiry_days", "timeout_s", "unread_s"):
            if not (value := getattr(self, name)) > 0:
                raise ConfigError(f"{name} is {value}; --{name.replace('_', '-')} must be more than 0")
        if self.running > self.awake:
            raise ConfigError(f"--running {self.running} needs --awake {self.running} or more, not {self.awake}")
        for origin in self.allow_origin:
            if origin not in ("*", "null") and not re.fullmatch(r"[\w.+-]+://[^/?#@]+", origin):
                raise ConfigError(f"--allow-origin {origin}: write it like https://chat.example.org, without a path")
        if not (self.api_keys or self.on_loopback or self.api_keys or self.allow_anyone):
            raise ConfigError(
                f"--host {self.host} lets other machines in; set a key by --api-key-file or H2O_API_KEY, "
                "or say --allow-anyone"
            )

    @cached_property
    def api_keys(self) -> tuple[str, ...]:
        """All keys; none lets everybody in.

        Raises:
            ConfigError: the file has none.
            DataError: it cannot be read.
        """
        keys = [] if self.api_key is None else [check_key(self.api_key, "--api-key or H2O_API_KEY")]
        if self.api_key_file is not None:
            place = f"--api-key-file {self.api_key_file}"
            with file_errors(place), self.api_key_file.open("rb") as file:
                data = file.read(_MAX_KEYS + 1)
            if len(data) > _MAX_KEYS:
                raise ConfigError(f"{place} has more than {_MAX_KEYS} bytes")
            lines = enumerate(data.decode("utf-8-sig", "replace").replace("\r\n", "\n").split("\n"), 1)
            file_keys = [
                check_key(line, f"{place}, line {number},")
                for number, line in lines
                if line.strip() and not line.startswith("#")
            ]
            if not file_keys:
                raise ConfigError(f"{place} has no key; write one a line")
            keys += file_keys
        return tuple(keys)

    @property
    def on_loopback(self) -> bool:
        """Whether only programs on this machine reach the server."""
        try:
            return self.host.lower() == "localhost" or ip_address(self.host).is_loopback
        except ValueError:
            return False


def check_key(key: str, source: str) -> str:
    """The same API key; raises ConfigError, which names its source and not the key, if no client can send it so."""
    if not key.strip():
        raise ConfigError(f"{source} is empty; leave it out to let everybody in")
    if key != key.strip() or not key.isprintable() or "\ufffd" in key:
        raise ConfigError(f"{source} has blanks around the key, or characters that no client can send")
    return key
