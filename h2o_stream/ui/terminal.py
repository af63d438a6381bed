"""Where output goes: replies to stdout, everything else to stderr. No text of a model becomes a control code."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.status import Status
from rich.table import Table
from rich.text import Text

from h2o_stream.errors import H2OStreamError
from h2o_stream.ui.format import format_duration

try:
    import termios
except ImportError:  # not on Windows
    termios = None  # type: ignore[assignment]

_CONTROLS: dict[int, str | None] = {
    **{code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"},
    **dict.fromkeys(range(0xD800, 0xE000), "\ufffd"),  # unpaired surrogates cannot be encoded
}

_BIDI = dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)))
"""Marks that change the display order of the text after them."""


_FRAMES_SHARE = 0.25
"""Of the time of what is drawn, for drawing it."""


def printable(text: str) -> str:
    """Text without control characters and escape sequences, but with line breaks and tabs.

    All text for a terminal passes through here. The consoles of this module do so by themselves.
    """
    return text.translate(_CONTROLS)


def one_line(text: object) -> str:
    """A name for a list or an error: printable, on one line, and without marks that reorder the text around it."""
    return printable(" ".join(str(text).split()).translate(_BIDI))


def folded(table: Table) -> Table:
    """The table, in which words that are wider than their column go on in the next line, and are not cut."""
    for column in table.columns:
        column.overflow = "ellipsis" if column.no_wrap else "fold"
    return table


class SafeConsole(Console):
    """rich's console, with all text made `printable`. Its own escape sequences are kept."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments without control characters in their text. All output passes through here."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or (shown := printable(text)) == text else Segment(shown, style)

    def on_broken_pipe(self) -> None:
        """Raise, as any other write to a closed pipe does."""
        raise BrokenPipeError


class Terminal:
    """The two output streams and their capabilities.

    Attributes:
        interactive: a person types and reads here.
        live: stdout and stderr are a terminal that can be drawn on.
        picture: file for a picture of the last screen, if one is wanted.
    """

    def __init__(self, color: str = "auto", quiet: bool = False, replies: bool = True, verbose: bool = False) -> None:
        options: dict[str, Any] = {
            "force_terminal": True if color == "on" else None,
            "color_system": None if color == "off" else "auto",
            "highlight": False,
            "markup": False,
            "emoji": False,
        }
        self.console = SafeConsole(stderr=True, width=None if sys.stderr.isatty() else 100, **options)
        self.stdout_console = SafeConsole(**options)
        self.quiet, self._replies, self._verbose = quiet, replies, verbose
        self.picture: Path | None = None
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self.live = sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") not in (None, "", "dumb")

    def reply(self, text: str) -> None:
        """Write a piece of a reply to stdout and flush it."""
        if self._replies and text:
            sys.stdout.write(printable(text))
            sys.stdout.flush()

    def note(self, line: str, style: str = "") -> None:
        """Write a line to stderr, unless quiet."""
        if not self.quiet:
            self.console.print(line, style=style, soft_wrap=not self.live)

    def detail(self, line: str) -> None:
        """Write a line to stderr if ``--verbose`` is given."""
        if self._verbose:
            self.note(line, style="dim")

    def error(self, line: str) -> None:
        """Write a line to stderr, even if quiet."""
        self.console.print(line, style="red", soft_wrap=not self.live)

    def copy(self, text: str) -> None:
        """Put a text into the clipboard of the terminal, wherever that is: by OSC 52, or by tmux, which may refuse it.

        Raises H2OStreamError if there is no terminal.
        """
        if not self.live:
            raise H2OStreamError("there is no terminal to copy to")
        data = text.encode("utf-8", "replace")
        sys.stdout.write(f"\x1b]52;c;{base64.b64encode(data).decode()}\a")
        sys.stdout.flush()
        if "TMUX" in os.environ and (tmux := shutil.which("tmux")):
            subprocess.run([tmux, "load-buffer", "-w", "-"], input=data, capture_output=True, check=False)

    @contextmanager
    def unechoed(self) -> Iterator[None]:
        """What is typed inside the block, while something is drawn, is not shown before the next prompt reads it."""
        before = _foreground_settings() if self.live else None
        if before is not None:
            flags = before[3] & ~termios.ECHO
            termios.tcsetattr(sys.stdin, termios.TCSANOW, [*before[:3], flags, *before[4:]])
        try:
            yield
        finally:
            if before is not None and _foreground_settings() is not None:
                with suppress(termios.error):
                    termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _foreground_settings() -> list[Any] | None:
    """How the terminal of stdin is set; None if there is none, or if changing it would stop this process."""
    if termios is None or not sys.stdin.isatty():
        return None
    try:
        in_foreground = os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
        return termios.tcgetattr(sys.stdin) if in_foreground else None
    except (OSError, termios.error):  # it hung up
        return None


class Frames(Live):
    """rich's live display, drawn only when asked, and at most every `frame_s`: drawing takes time from the model.

    Frames that take long, as those of long blocks do, are rarer: they take no more than `_FRAMES_SHARE` of the time.
    """

    def __init__(self, shown: RenderableType, console: Console, frame_s: float, **settings: Any) -> None:
        super().__init__(shown, console=console, auto_refresh=False, **settings)
        self._frame_s, self._next_at = frame_s, 0.0

    def draw(self, now: bool = False) -> None:
        """Draw, if the last frame is old enough or it has to be now."""
        begun = time.monotonic()
        if now or begun >= self._next_at:
            self.refresh()
            drawn = time.monotonic()
            self._next_at = drawn + max(self._frame_s, (drawn - begun) / _FRAMES_SHARE)


class PrefillStatus:
    """The progress of a long prompt: one redrawn line in a terminal, a line every few seconds elsewhere."""

    EVERY_S = 3.0

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._status: Status | None = None
        self._begun_at = self._noted_at = time.monotonic()

    def show(self, done: int, total: int) -> None:
        """Show that `done` of `total` tokens are fed, and how long the rest takes. The last call removes the line."""
        line = f"reading {done:,} of {total:,} tokens"
        elapsed_s = time.monotonic() - self._begun_at
        if elapsed_s >= self.EVERY_S:
            line += f", {format_duration(elapsed_s * (total - done) / done)} left"
        if done == total:
            self.close()
        elif self._terminal.quiet:
            return
        elif self._terminal.live:
            if self._status is None:
                self._status = self._terminal.console.status(Text(line))
                self._status.start()
            self._status.update(Text(line))
        elif time.monotonic() - self._noted_at >= self.EVERY_S:
            self._terminal.note(line, style="dim")
            self._noted_at = time.monotonic()

    def close(self) -> None:
        """Remove the line."""
        if self._status is not None:
            self._status.stop()
        self._status = None
        self._begun_at = self._noted_at = time.monotonic()
