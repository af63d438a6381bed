"""Where output goes: replies to stdout, everything else to stderr, nothing a model says becomes a control code."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

_CONTROLS: dict[int, str | None] = {
    **{code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"},
    **dict.fromkeys(range(0xD800, 0xE000), "\ufffd"),  # halves of a pair: no encoding has them
}

_BIDI = dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)))
"""Marks that have the letters after them shown in another order."""


def printable(text: str) -> str:
    """Text without control characters (escape sequences among them), line breaks and tabs kept.

    Whatever reaches a terminal has passed here: consoles of this module see to it by themselves.
    """
    return text.translate(_CONTROLS)


def one_line(text: object) -> str:
    """The same for a name in a list or an error: on one line, and without marks that reorder the letters around it."""
    return printable(" ".join(str(text).split()).translate(_BIDI))


class SafeConsole(Console):
    """rich's console; what it is to show passes `printable`, its own escape sequences do not."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See rich: every piece of text comes this way."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or (shown := printable(text)) == text else Segment(shown, style)

    def on_broken_pipe(self) -> None:
        """Nobody reads: for the caller to know, as everywhere else."""
        raise BrokenPipeError


class Terminal:
    """The two output streams and what they can do.

    Args:
        color: ``auto``, ``on`` or ``off``.
        quiet: no notes.
        replies: whether reply text is written to stdout at all.
        verbose: details too.

    Attributes:
        console: rich's console on stderr.
        page: the same on stdout.
        interactive: a person types and reads here.
        live: stdout and stderr are one terminal that can be drawn on.
    """

    def __init__(self, color: str = "auto", quiet: bool = False, replies: bool = True, verbose: bool = False) -> None:
        looks: dict[str, Any] = {
            "force_terminal": True if color == "on" else None,
            "color_system": None if color == "off" else "auto",
            "highlight": False,
            "markup": False,
            "emoji": False,
        }
        self.console = SafeConsole(stderr=True, width=None if sys.stderr.isatty() else 100, **looks)
        self.page = SafeConsole(**looks)
        self.quiet, self._replies, self._verbose = quiet, replies, verbose
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self.live = sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") not in (None, "", "dumb")

    def reply(self, text: str) -> None:
        """Write a piece of a reply to stdout, at once."""
        if self._replies and text:
            sys.stdout.write(printable(text))
            sys.stdout.flush()

    def note(self, line: str, style: str = "") -> None:
        """Write a line to stderr, unless quiet."""
        if not self.quiet:
            self.console.print(line, style=style, soft_wrap=True)

    def detail(self, line: str) -> None:
        """Write a line to stderr that only ``--verbose`` asks for."""
        if self._verbose:
            self.note(line, style="dim")

    def error(self, line: str) -> None:
        """Write a line to stderr, quiet or not."""
        self.console.print(line, style="red", soft_wrap=True)


class Reading:
    """How far a long prompt has come: one line redrawn in a terminal, a line every few seconds elsewhere."""

    EVERY_S = 3.0

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._status: Status | None = None
        self._noted_at = time.monotonic()

    def show(self, done: int, total: int) -> None:
        """`done` of `total` tokens are read; the last call takes the line away."""
        line = f"reading {done:,} of {total:,} tokens"
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
        """Take the line away."""
        if self._status is not None:
            self._status.stop()
        self._status, self._noted_at = None, time.monotonic()
