"""Programs in a pseudo-terminal with a terminal emulator."""

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import pyte

from tests.preloaded import Preloaded

BIN = Path(sys.executable).parent

_QUIET_S, _DRAWN_S = 0.05, 0.3
"""A program counts as done drawing after this much silence, or at the latest after the second duration."""

_WHERE = "\x1b[6n"
"""The request for the cursor position, which a terminal must answer."""

_FRAME = re.compile(r"(?=\x1b\[H|\r\x1b\[2K|\x1b\[\?(?:1049|25)l)")
"""Where frames begin: of full screens, of lines that are drawn again, and of the prompt."""

_CUT_OFF = re.compile(r"\x1b(?:\[[?\d;]*)?$")
"""The beginning of a control sequence whose end is still to be read."""


class Pty:
    """Runs a command in a terminal of the given size and keeps what a user would see.

    Frames are shown one by one: `until` sees each of them, however many wait to be read.

    Args:
        started: start a new interpreter, to test startup itself, instead of forking one that has imported everything.
    """

    def __init__(
        self,
        command: str,
        *arguments: str,
        columns: int = 80,
        lines: int = 24,
        home: Path | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
        started: bool = False,
    ) -> None:
        env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "", "LINES": ""}
        env.pop("NO_COLOR", None)
        if home is not None:
            env["XDG_DATA_HOME"] = str(home)
        self.screen = pyte.Screen(columns, lines)
        self.stream = pyte.Stream(self.screen)
        self.output = ""
        self._decoder, self._cut_off = codecs.getincrementaldecoder("utf-8")("replace"), ""
        self._frames: list[str] = []
        self.side, program = pty.openpty()
        self.resize(columns, lines)
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), program)
        streams["env"] = env | dict(environment)
        self.process: subprocess.Popen[Any]
        if started:
            self.process = subprocess.Popen(
                [BIN / command, *arguments], start_new_session=True, preexec_fn=_control_terminal, **streams
            )
        else:
            self.process = Preloaded([command, *arguments], terminal=True, **streams)
        os.close(program)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.hang_up()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.process.kill()
        self.process.wait()

    @property
    def text(self) -> str:
        """The current screen."""
        return "\n".join(self.screen.display)

    def send(self, keys: str | bytes) -> None:
        """Press keys once the program has finished drawing: a prompt may be visible before it reads."""
        deadline = time.monotonic() + _DRAWN_S
        while time.monotonic() < deadline and self._shows(_QUIET_S) and self._read():
            pass
        os.write(self.side, keys.encode() if isinstance(keys, str) else keys)

    def leave(self) -> int:
        """Press Ctrl-D at the prompt and return the exit code. Between prompts, the terminal would swallow it."""
        self.until(lambda pty: not termios.tcgetattr(pty.side)[3] & termios.ICANON)
        self.send("\x04")
        return self.exit_code()

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.side, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def hang_up(self) -> None:
        """Close the terminal."""
        if self.side >= 0:
            os.close(self.side)
            self.side = -1

    def until(self, done: Callable[[Self], bool], timeout_s: float = 60) -> None:
        """Read until the screen satisfies `done`."""
        deadline = time.monotonic() + timeout_s
        while not done(self):
            assert time.monotonic() < deadline, f"timed out; the screen was:\n{self.text}"
            if not self._read():
                assert done(self), f"the program ended; the screen was:\n{self.text}"

    def exit_code(self, timeout_s: float = 60) -> int:
        """Read until the program ends and return its exit code."""
        deadline = time.monotonic() + timeout_s
        while self._read():
            assert time.monotonic() < deadline, f"timed out; the screen was:\n{self.text}"
        self.hang_up()
        return self.ended(timeout_s)

    def ended(self, timeout_s: float = 20) -> int:
        """Wait for the program and return its exit code, or 128 plus the signal that killed it."""
        code = self.process.wait(timeout_s)
        return code if code >= 0 else 128 - code

    def _shows(self, timeout_s: float) -> bool:
        return bool(self._frames or select.select([self.side], [], [], timeout_s)[0])

    def _read(self) -> bool:
        """Show the next frame of the output, if there is one; returns whether there may be more."""
        if not self._shows(0.2):
            return True
        if not self._frames:
            try:
                received = os.read(self.side, 65536)
            except OSError:  # how Linux reports a closed terminal
                received = b""
            if not received:
                return False
            text = self._cut_off + self._decoder.decode(received)
            self._cut_off = match[0] if (match := _CUT_OFF.search(text)) else ""
            self._frames = _FRAME.split(text.removesuffix(self._cut_off))
        frame = self._frames.pop(0)
        self.output += frame
        self.stream.feed(frame)
        for _ in range(frame.count(_WHERE)):
            os.write(self.side, f"\x1b[{self.screen.cursor.y + 1};{self.screen.cursor.x + 1}R".encode())
        return True


def _control_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
