"""Shows a reply while it streams: as plain text, or as Markdown on a live terminal.

Markdown is shown block by block. Finished blocks are printed once. Only the last block, which is still growing, is
redrawn, with the state of the cache below it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment, Segments
from rich.text import Text

from h2o_stream.config import ThinkMode
from h2o_stream.engine.events import Token
from h2o_stream.ui.terminal import Frames, Terminal

_FRAME_S = 0.08
"""Between two frames: short enough to read along, long enough to cost the model no time."""

_FENCE = re.compile(r" {0,3}(```+|~~~+)")

_CODE_THEME = "ansi_dark"

_THINKING_STYLE = "dim"


class Thinking:
    """The thinking of one reply, while it is generated: all of it is `shown`, or a line (`folded`) that ends with the
    hint.

    The mode ``off`` is ``fold``, for a model that thinks nevertheless.
    """

    def __init__(self, mode: ThinkMode, hint: str = "") -> None:
        self.text = ""
        self.shown, self.folded = mode == "show", mode in ("fold", "off")
        self._hint = hint
        self._tokens = 0
        self._ended = False

    @property
    def line(self) -> str:
        """The line of folded thinking: while it lasts, and after it. Empty if there is none."""
        if not self.folded or not (self.text if self._ended else self._tokens):
            return ""
        count = "1 token" if self._tokens == 1 else f"{self._tokens:,} tokens"
        return f"thought for {count}{self._hint}" if self._ended else f"thinking … {count}"

    @property
    def active(self) -> bool:
        """Whether the reply is thinking now."""
        return self._tokens > 0 and not self._ended

    def add(self, text: str) -> None:
        """Append a token, with the text that it completes."""
        self._tokens += 1
        self.text += text

    def end(self) -> bool:
        """The answer begins, or the reply ends. Returns whether there was thinking that had not ended."""
        was_active, self._ended = self.active, self._tokens > 0
        return was_active


class PlainReply:
    """Writes a reply as plain text. A context manager: leaving it ends the reply.

    Thinking that is shown goes to stdout between tags, a line about it to stderr.
    """

    def __init__(self, terminal: Terminal, thinking: Thinking | None = None) -> None:
        self._terminal, self._thinking = terminal, thinking or Thinking("fold")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the reply."""
        self._end_thinking()
        self._terminal.reply("\n")

    def add_token(self, token: Token) -> None:
        """Append a token's thinking and text."""
        if token.thinking is not None:
            self.think(token.thinking)
        self.push(token.text)

    def think(self, text: str) -> None:
        """Append a token of thinking, with the text that it completes."""
        if self._thinking.shown:
            self._terminal.reply(text if self._thinking.active else f"<think>\n{text}")
        self._thinking.add(text)

    def push(self, text: str) -> None:
        """Append text."""
        if text:
            self._end_thinking()
        self._terminal.reply(text)

    def _end_thinking(self) -> None:
        if not self._thinking.end():
            return
        if self._thinking.shown:
            self._terminal.reply("\n</think>\n\n")
        elif self._thinking.line:
            self._terminal.note(self._thinking.line, style="dim")


class MarkdownReply:
    """Draws a reply as Markdown on a live console. A context manager: leaving it ends the reply.

    The line below it is made for a width. Thinking is dim and above the answer.
    """

    def __init__(self, footer: Callable[[int], Text], console: Console, thinking: Thinking | None = None) -> None:
        self._console, self._footer = console, footer
        self._thinking, self._open_thought = thinking or Thinking("fold"), ""
        self._blocks = MarkdownBlocks()
        self._printed = False
        self._live = Frames(self, self._console, _FRAME_S, transient=True)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *exception: object) -> None:
        self._end_thinking()
        self._print(self._blocks.close())
        self._live.stop()

    def add_token(self, token: Token) -> None:
        """Append a token's thinking and text."""
        if token.thinking is not None:
            self.think(token.thinking)
        self.push(token.text)

    def think(self, text: str) -> None:
        """Append a token of thinking, with the text that it completes."""
        self._thinking.add(text)
        finished = list[str]()
        if self._thinking.shown:
            *finished, self._open_thought = (self._open_thought + text).split("\n")
        for line in finished:
            self._console.print(Text(line, _THINKING_STYLE))
        self._live.draw(now=bool(finished))

    def push(self, text: str) -> None:
        """Append text."""
        if text:
            self._end_thinking()
        finished = self._blocks.push(text)
        self._print(finished)
        self._live.draw(now=bool(finished))

    def _end_thinking(self) -> None:
        if not self._thinking.end():
            return
        line, self._open_thought = self._open_thought or self._thinking.line, ""
        if line:
            self._console.print(Text(line, _THINKING_STYLE))
        self._printed = self._thinking.shown and bool(self._thinking.text)

    def _print(self, blocks: list[str]) -> None:
        for block in blocks:
            if self._printed:
                self._console.print()
            lines = _render(self._console, self._console.options, block)
            self._console.print(Segments([segment for line in lines for segment in (*line, Segment.line())]))
            self._printed = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The last lines of the growing block that fit, and the footer."""
        room = max(console.height - 2, 1)
        lines = []
        if self._thinking.active and (thought := self._open_thought or self._thinking.line):
            lines = console.render_lines(Text(thought, _THINKING_STYLE), options, pad=False)
        if self._blocks.open:
            lines = _render(console, options, close_marks(self._blocks.open))
            if self._printed:
                lines = [[Segment("")], *lines]
        for line in lines[-room:]:
            yield from line
            yield Segment.line()
        yield self._footer(options.max_width)


Reply = PlainReply | MarkdownReply


class MarkdownBlocks:
    """Splits growing Markdown into blocks: at empty lines outside code, and where code begins and ends."""

    def __init__(self) -> None:
        self._lines = self._rest = self._fence = ""

    @property
    def open(self) -> str:
        """The unfinished block."""
        return self._lines + self._rest

    def push(self, text: str) -> list[str]:
        """Append text. Returns the blocks that it finishes."""
        *lines, self._rest = (self._rest + text).split("\n")
        return [block for line in lines for block in self._add_line(line)]

    def close(self) -> list[str]:
        """End the text. Returns the last block, if there is one."""
        block, self._lines, self._rest = self.open, "", ""
        return [block] if block.strip() else []

    def _add_line(self, line: str) -> list[str]:
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


def close_marks(block: str) -> str:
    """A growing block with its open marks closed, so that the text does not move when they are closed later."""
    if _FENCE.match(block):
        return block
    last = block.rpartition("\n")[2]
    for mark in ("`", "**"):
        if last.count(mark) % 2:
            block = block.removesuffix(mark) if block.endswith(mark) else block + mark
    return block


def _render(console: Console, options: ConsoleOptions, block: str) -> list[list[Segment]]:
    """A block as lines, without empty lines before and after it."""
    from h2o_stream.ui.markdown import ReplyMarkdown

    lines = console.render_lines(ReplyMarkdown(block, _CODE_THEME), options, pad=False)
    filled = [number for number, line in enumerate(lines) if any(segment.text.strip() for segment in line)]
    return lines[filled[0] : filled[-1] + 1] if filled else []
