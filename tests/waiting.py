"""Waiting for what happens in other threads and processes."""

import time
from collections.abc import Callable


def wait_for(what: Callable[[], object], timeout_s: float = 60) -> None:
    """Until it is true."""
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "this takes too long"
        time.sleep(0.01)
