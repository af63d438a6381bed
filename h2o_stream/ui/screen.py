"""Shows a run: on a live screen, or as plain text."""

from __future__ import annotations

from typing import Self

import psutil
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.panel import Panel
from rich.text import Text

from h2o_stream.base.memory import format_bytes
from h2o_stream.config import ThinkMode
from h2o_stream.engine.events import PrefillProgress, Token
from h2o_stream.recall.passage import Recalled
from h2o_stream.session.report import RunReport
from h2o_stream.session.turn import Turn
from h2o_stream.ui.format import context_bar, format_speed, kept_text, legend, slot_bar, turn_line
from h2o_stream.ui.recall import note_recalled, recalled_lines
from h2o_stream.ui.recording import save_picture
from h2o_stream.ui.reply import PlainReply, Thinking
from h2o_stream.ui.terminal import Frames, PrefillStatus, Terminal
from h2o_stream.ui.timeline import draw_timeline

FRAME_S = 0.1
"""Between two frames."""


class Screen:
    """Draws a run: transcript above, cache, speed and their course below. Uses the whole terminal while it lasts.

    At the end the terminal is restored, and the transcript is printed: what was said stays. The model's context is the
    scale of a cache without a window. A given report is kept up to date by its owner.
    """

    def __init__(
        self,
        terminal: Terminal,
        title: str,
        context: int | None,
        think: ThinkMode = "fold",
        report: RunReport | None = None,
    ) -> None:
        self._terminal, self._title, self._context, self._think = terminal, title, context, think
        self._report, self._reporting = report or RunReport(), report is None
        self._thinking = Thinking(think)
        self._turn_title = ""
        self._transcript = [_Line(Text())]
        self._event: PrefillProgress | Token | Turn | None = None
        self._prefill = self._decode = ""
        self._new = 0
        self._process = psutil.Process()
        self._live = Frames(self, terminal.console, FRAME_S, screen=True)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()
        save_picture(self._terminal, self)
        for line in self._transcript:
            self._live.console.print(line.text)

    def start_turn(self, title: str, prompt: str) -> None:
        """Show that a turn begins."""
        self._turn_title, self._new, self._thinking = title, 0, Thinking(self._think)
        self._write(("\n\n" if self._event else "") + f"> {prompt}\n", "cyan")
        self._live.draw(now=True)

    def add_event(self, event: Recalled | PrefillProgress | Token | Turn) -> None:
        """Show an event of the turn."""
        if isinstance(event, Recalled):
            for line in recalled_lines(event, self._live.console.width - 4):
                self._write(f"{line}\n", "dim")
            return
        if self._reporting:
            self._report.add_event(event)
        self._event = event
        if isinstance(event, PrefillProgress):
            self._prefill = f"{_rate(event.done, event.elapsed_s)} ({event.done:,}/{event.total:,})"
        elif isinstance(event, Token):
            self._new += 1
            self._write_reply(event)
            self._decode = _rate(self._new, event.elapsed_s)
        else:
            self._end_thinking()
            if event.finish != "stop":
                self._write(f" [{event.finish}]", "yellow")
        self._live.draw(now=isinstance(event, Turn))

    def _write_reply(self, token: Token) -> None:
        if token.thinking is not None:
            self._thinking.add(token.thinking)
            if self._thinking.shown:
                self._write(token.thinking, "dim")
        if token.text:
            self._end_thinking()
            self._write(token.text)

    def _end_thinking(self) -> None:
        if self._thinking.end():
            self._write("\n\n" if self._thinking.shown else f"{self._thinking.line}\n", "dim")

    def _write(self, text: str, style: str = "") -> None:
        first, *rest = text.expandtabs(4).split("\n")
        self._transcript[-1].text.append(first, style)
        self._transcript.extend(_Line(Text(line, style)) for line in rest)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or console.height
        status = self._status(width - 4, height)
        body = max(height - len(status) - 4, 1)
        yield Group(
            Panel(
                self._tail(console, width - 4, body),
                title=Text(self._title),
                subtitle=Text(self._turn_title),
                height=body + 2,
            ),
            Panel(Group(*status), height=len(status) + 2),
        )

    def _tail(self, console: Console, width: int, lines: int) -> Text:
        """The last lines of the transcript that fit."""
        shown: list[Text] = []
        for line in reversed(self._transcript):
            shown[:0] = line.wrap(console, width)
            if len(shown) >= lines:
                break
        return Text("\n", no_wrap=True, overflow="crop").join(shown[-lines:])

    def _status(self, width: int, height: int) -> list[Text]:
        if self._event is None:
            return [Text("starting")]
        counts = self._event.counts
        bar = slot_bar(counts, width) or context_bar(counts, self._context, width)
        uses = [(color, f"{text}  ") for color, text in legend(counts, self._context)]
        seen = f"seen {counts.seen:,}  {kept_text(counts)}  evicted {counts.evicted:,}"
        rates = f"prefill {self._prefill or '-'}  decode {self._decode or '-'}"
        memory = f"cache {format_bytes(counts.nbytes)}, whole process {format_bytes(self._process.memory_info().rss)}"
        parts = [seen, rates, memory] if width < 100 else [f"{seen}  │  {rates}", memory]
        parts = [f"{seen}  │  {rates}  │  {memory}"] if width >= 150 else parts
        lines = [
            *(colored(pairs) for pairs in (bar, uses)),
            *(Text(line, no_wrap=True, overflow="ellipsis") for line in parts),
        ]
        rows = min(max((height - 20) // 6, 1), 5)
        return [*lines, *draw_timeline(self._report.timeline, width, rows, self._context)]


def colored(pairs: list[tuple[str, str]]) -> Text:
    """A line of texts, given with their colors."""
    return Text.assemble(*((text, color) for color, text in pairs), no_wrap=True, overflow="ellipsis")


class _Line:
    """A line of the transcript. It is wrapped again only if it has grown or the width has changed."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self._wrapped: list[Text] = []
        self._wrapped_for = (-1, -1)

    def wrap(self, console: Console, width: int) -> list[Text]:
        if self._wrapped_for != (len(self.text), width):
            self._wrapped, self._wrapped_for = list(self.text.wrap(console, width)), (len(self.text), width)
        return self._wrapped


class PlainView:
    """Writes a run as plain text: replies to stdout, a line before and after each to stderr."""

    def __init__(self, terminal: Terminal, think: ThinkMode = "fold") -> None:
        self._terminal, self._think = terminal, think
        self._status = PrefillStatus(terminal)
        self._reply = PlainReply(terminal, Thinking(think))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._status.close()

    def start_turn(self, title: str, prompt: str) -> None:
        """Show that a turn begins."""
        self._terminal.note(f"[{title}] {prompt}", style="cyan")
        self._reply = PlainReply(self._terminal, Thinking(self._think))

    def add_event(self, event: Recalled | PrefillProgress | Token | Turn) -> None:
        """Show an event of the turn."""
        if isinstance(event, Recalled):
            note_recalled(self._terminal, event)
        elif isinstance(event, PrefillProgress):
            self._status.show(event.done, event.total)
        elif isinstance(event, Token):
            self._reply.add_token(event)
        else:
            self._status.close()
            self._reply.close()
            self._terminal.note(turn_line(event), style="dim")


def _rate(tokens: int, elapsed_s: float) -> str:
    return format_speed(tokens / elapsed_s if elapsed_s else 0.0)
