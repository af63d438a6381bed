"""A real pseudo-terminal with a real terminal emulator behind it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

import pexpect
import pyte

BIN = Path(sys.executable).parent

_WHERE = "\x1b[6n"
"""What a program sends to ask where the cursor is; a terminal answers."""


class Pty:
    """Runs a command in a terminal of the given size and keeps what a person would see."""

    def __init__(
        self,
        command: str,
        *arguments: str,
        columns: int = 80,
        lines: int = 24,
        home: Path | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        given = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "", "LINES": ""}
        given.pop("NO_COLOR", None)
        if home is not None:
            given["XDG_DATA_HOME"] = str(home)
        self.screen = pyte.Screen(columns, lines)
        self.stream = pyte.Stream(self.screen)
        self.output = ""
        self.frames: list[list[str]] = []
        self.child = pexpect.spawn(
            str(BIN / command),
            list(arguments),
            dimensions=(lines, columns),
            env=given | dict(environment),
            encoding="utf-8",
            codec_errors="replace",
            timeout=60,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.child.close(force=True)

    @property
    def text(self) -> str:
        """The screen as it is now."""
        return "\n".join(self.screen.display)

    def send(self, keys: str) -> None:
        self.child.send(keys)

    def until(self, done: Callable[[Pty], bool], timeout_s: float = 60) -> None:
        """Let the program go on until the screen satisfies `done`."""
        deadline = time.monotonic() + timeout_s
        while not done(self):
            assert time.monotonic() < deadline, f"timed out; the screen was:\n{self.text}"
            if not self._read():
                assert done(self), f"the program ended; the screen was:\n{self.text}"

    def exit_code(self, timeout_s: float = 60) -> int:
        """Read to the end and return the exit code."""
        deadline = time.monotonic() + timeout_s
        while self._read():
            assert time.monotonic() < deadline, f"timed out; the screen was:\n{self.text}"
        self.child.close()
        return self.child.exitstatus if self.child.exitstatus is not None else 128 + self.child.signalstatus

    def _read(self) -> bool:
        try:
            data = self.child.read_nonblocking(65536, timeout=0.2)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.output += data
        self.stream.feed(data)
        for _ in range(data.count(_WHERE)):
            self.child.send(f"\x1b[{self.screen.cursor.y + 1};{self.screen.cursor.x + 1}R")
        self.frames.append(list(self.screen.display))
        return True
