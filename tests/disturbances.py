"""Disturbances: Ctrl-C at any line, a full disk, and a call that fails."""

import errno
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest

import h2o_stream

_ROOT = str(Path(h2o_stream.__file__).parent)


@contextmanager
def interrupted(line: int, within: tuple[str, ...] = ("session", "engine", "cache")) -> Iterator[None]:
    """Raise KeyboardInterrupt before the n-th line, counted from 1, that the block executes in these packages."""
    places = tuple(f"{_ROOT}{os.sep}{name}{os.sep}" for name in within)
    left = line

    def in_frame(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return in_frame

    def called(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        return in_frame if left > 0 and frame.f_code.co_filename.startswith(places) else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(before)


class FullDisk(OSError):
    """No space left on the device."""

    def __init__(self) -> None:
        super().__init__(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def full_disk(first: int = 1, last: int = 10**9) -> Iterator[Callable[[], int]]:
    """Fail calls that need disk space (new files, folders, syncs, renames), from the `first` to the `last`. Yields what
    returns how many there were.
    """
    count = 0

    def failing(real: Callable[..., Any], needs_room: Callable[..., bool]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if needs_room(*args):
                count += 1
                if first <= count <= last:
                    raise FullDisk
            return real(*args, **kwargs)

        return call

    def always(*_: Any) -> bool:
        return True

    def creates(path: Any, flags: int = 0, *_: Any) -> bool:
        return bool(flags & os.O_CREAT) and str(path).endswith((".part", ".jsonl"))

    with (
        patch("os.open", failing(os.open, creates)),
        patch("os.fsync", failing(os.fsync, always)),
        patch.object(Path, "replace", failing(Path.replace, always)),
        patch.object(Path, "mkdir", failing(Path.mkdir, always)),
    ):
        yield lambda: count


@contextmanager
def short_files(limit: int) -> Iterator[None]:
    """Let files have no more bytes than this: what passes it is written up to there, and the next write fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception) -> list[Any]:
    """Let the first call of a function fail. Returns a list that is not empty after that."""
    failed, original, lock = list[Any](), getattr(owner, name), threading.Lock()

    def call(*values: Any, **named: Any) -> Any:
        with lock:
            first = not failed
            failed.append(values)
        if first:
            raise error
        return original(*values, **named)

    monkeypatch.setattr(owner, name, call)
    return failed
