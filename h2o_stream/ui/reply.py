"""A reply while it streams: as it is, or as Markdown in a terminal that can be drawn on.

Markdown is shown block by block. What is finished is printed for good; only the last block, which is still growing, is
drawn anew, with the figures of the cache under it.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, Segments
from rich.text import Text

from h2o_stream.ui.terminal import Terminal

_FRAME_S = 0.08
"""Between two frames: quick enough to read along, rare enough to cost the model nothing."""

_FENCE = re.compile(r" {0,3}(```+|~~~+)")

_CODE_THEME = "ansi_dark"


class Reply(ABC):
    """A reply that grows. A context manager: leaving it ends the reply."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *exception: object) -> None:
        """It has come to its end."""

    @abstractmethod
    def push(self, text: str) -> None:
        """More of it."""


class PlainReply(Reply):
    """Writes a reply as it comes."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def __exit__(self, *exception: object) -> None:
        self._terminal.reply("\n")

    def push(self, text: str) -> None:
        """See `Reply`."""
        self._terminal.reply(text)


class MarkdownReply(Reply):
    """Draws a reply as Markdown.

    Args:
        footer: the line under it.
        console: a live one, on stdout.
    """

    def __init__(self, footer: Callable[[int], Text], console: Console) -> None:
        self._console, self._footer = console, footer
        self._blocks = Blocks()
        self._drawn_at = 0.0
        self._said = False
        self._live = Live(self, console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *exception: object) -> None:
        self._print(self._blocks.close())
        self._live.stop()

    def push(self, text: str) -> None:
        """See `Reply`."""
        finished = self._blocks.push(text)
        self._print(finished)
        if finished or time.monotonic() - self._drawn_at >= _FRAME_S:
            self._live.refresh()
            self._drawn_at = time.monotonic()

    def _print(self, blocks: list[str]) -> None:
        for block in blocks:
            if self._said:
                self._console.print()
            lines = _lines(self._console, self._console.options, block)
            self._console.print(Segments([segment for line in lines for segment in (*line, Segment.line())]))
            self._said = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The newest lines of the growing block that fit, and the footer."""
        room = max(console.height - 2, 1)
        lines = []
        if self._blocks.open:
            lines = _lines(console, options, closed(self._blocks.open))
            if self._said:
                lines = [[Segment("")], *lines]
        for line in lines[-room:]:
            yield from line
            yield Segment.line()
        yield self._footer(options.max_width)


class Blocks:
    """Cuts Markdown that grows into blocks: at empty lines that are in no code, and where code begins and ends."""

    def __init__(self) -> None:
        self._lines = self._rest = self._fence = ""

    @property
    def open(self) -> str:
        """The block that is not finished."""
        return self._lines + self._rest

    def push(self, text: str) -> list[str]:
        """Take in more text; returns the blocks that it finishes."""
        *lines, self._rest = (self._rest + text).split("\n")
        return [block for line in lines for block in self._take(line)]

    def close(self) -> list[str]:
        """The block that was open when the text ended."""
        block, self._lines, self._rest = self.open, "", ""
        return [block] if block.strip() else []

    def _take(self, line: str) -> list[str]:
        before, fence = self._lines, _FENCE.match(line)
        if self._fence:
            self._lines += line + "\n"
            if fence and fence[1].startswith(self._fence) and line.strip() == fence[1]:
                block, self._lines, self._fence = self._lines, "", ""
                return [block]
            return []
        if fence:
            self._lines, self._fence = line + "\n", fence[1]
        elif line.strip():
            self._lines += line + "\n"
            return []
        else:
            self._lines = ""
        return [before] if before.strip() else []


def closed(block: str) -> str:
    """A block that is still growing with its marks closed, so that what is shown of it stays where it is."""
    if _FENCE.match(block):
        return block
    last = block.rpartition("\n")[2]
    for mark in ("`", "**"):
        if last.count(mark) % 2:
            block = block.removesuffix(mark) if block.endswith(mark) else block + mark
    return block


def _lines(console: Console, options: ConsoleOptions, block: str) -> list[list[Segment]]:
    """A block as lines, without the empty ones that some kinds of block have around them."""
    lines = console.render_lines(Markdown(block, code_theme=_CODE_THEME), options, pad=False)
    said = [number for number, line in enumerate(lines) if any(segment.text.strip() for segment in line)]
    return lines[said[0] : said[-1] + 1] if said else []
