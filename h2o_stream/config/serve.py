"""Settings of ``h2o-serve``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from h2o_stream.errors import ConfigError


@dataclass(frozen=True)
class ServeConfig:
    """What ``h2o-serve`` serves, to whom, and within which limits.

    Args:
        host: address to listen on.
        port: to listen on; 0 takes a free one.
        api_key: clients must send it as ``Authorization: Bearer``; None lets everybody in.
        folder: where conversations are kept; None is the user's data folder.
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
        unread_s: seconds that a client may leave what it was sent unread, or take to send a request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
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

    def __post_init__(self) -> None:
        for name, minimum in (("awake", 1), ("running", 1), ("waiting", 0), ("states", 1), ("max_reply", 1)):
            if (value := getattr(self, name)) < minimum:
                raise ConfigError(f"{name} is {value}; --{name.replace('_', '-')} must be at least {minimum}")
        if self.unread_s <= 0:
            raise ConfigError(f"unread_s is {self.unread_s}; --unread-s must be more than 0")
        if self.running > self.awake:
            raise ConfigError(f"--running {self.running} needs --awake {self.running} or more, not {self.awake}")
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("the API key is empty; leave out --api-key to let everybody in")
