"""Modules that run in processes of their own beside the server."""

from __future__ import annotations

import socket
import subprocess
import sys
from multiprocessing.connection import Connection


def start_beside(module: str) -> tuple[Connection, subprocess.Popen[bytes]]:
    """Run a module, whose argument is a descriptor of the other end of the connection; raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()], process_group=0,  # not a session, see `yield_to_others`
        )  # fmt: skip
    return Connection(ours.detach()), process
