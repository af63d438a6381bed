"""Policies side by side: replies, what the caches hold, and the course of speed and memory to one scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Self

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.layout import Layout
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from h2o_stream.base.memory import format_bytes
from h2o_stream.engine.events import Finish, PrefillProgress, Token
from h2o_stream.recall.passage import Recalled
from h2o_stream.session.cliff import Cliff
from h2o_stream.session.messages import UserTurn
from h2o_stream.session.report import RunReport
from h2o_stream.session.turn import Turn
from h2o_stream.ui.format import context_bar, format_speed, legend, slot_bar, turn_line
from h2o_stream.ui.recall import note_recalled
from h2o_stream.ui.recording import save_picture
from h2o_stream.ui.screen import FRAME_S, colored
from h2o_stream.ui.start import LoadedConversation
from h2o_stream.ui.terminal import Frames, Terminal
from h2o_stream.ui.timeline import draw_timelines

_MIN_WIDTH = 36
"""Columns of a pane. A terminal that is too narrow for all shows the replies one after the other."""


Event = Recalled | PrefillProgress | Token | Turn


class Side:
    """The conversation of one policy: the reply so far, the last turn once it is finished, the last event with counts.

    `finish` says why the conversation ended.
    """

    def __init__(self, policy: str, loaded: LoadedConversation) -> None:
        self.policy, self.loaded, self.context = policy, loaded, loaded.conversation.engine.context
        self.text = ""
        self.turn: Turn | None = None
        self.finish: Finish | None = None
        self.report = RunReport()
        self.last: PrefillProgress | Token | Turn | None = None

    @property
    def eager(self) -> bool:
        """Whether its steps are the model's own, which are slower than native ones at any length."""
        return self.loaded.conversation.engine.cache.engine_note.startswith("eager")

    def say(self, prompt: UserTurn) -> Iterator[Event]:
        """One turn. Yields nothing once the conversation has ended."""
        self.text, self.turn = "", None
        if self.finish is not None:
            return
        for event in self.loaded.conversation.say(prompt):
            self.report.add_event(event)
            if not isinstance(event, Recalled):
                self.last = event
            if isinstance(event, Token):
                self.text += event.text
            elif isinstance(event, Turn):
                self.turn = event
                if event.finish in ("context", "oom", "interrupted"):
                    self.finish = event.finish
            yield event

    def read(self, cliff: Cliff) -> Iterator[PrefillProgress]:
        """Read the text before the cliff."""
        for event in cliff.read(self.loaded.conversation):
            self.report.add_event(event)
            self.last = event
            yield event
        self.report.end_turn()


def common_prefix(sides: Sequence[Side]) -> int:
    """Length of the common prefix of the replies."""
    pairs = zip(*(side.text for side in sides), strict=False)
    return len(list(takewhile(lambda pair: len(set(pair)) == 1, pairs)))


def verdict(sides: Sequence[Side], parted: str) -> str:
    """The comparison in one line, at its end; `parted` says where the replies differed first, if they did."""
    figures = ", ".join(
        f"{side.policy}{' (eager)' if side.eager else ''} {format_speed(side.report.total.decode_tok_s)} "
        f"and {format_bytes(side.report.cache_bytes)}"
        for side in sides
    )
    past = "".join(
        f"; {side.policy} is {side.report.seen - side.context:,} tokens past its context of {side.context:,}"
        for side in sides
        if side.report.beyond_context and side.context
    )
    return f"{figures} (in turn on the same cores); {parted or 'the replies never differ'}{past}"


class Panes:
    """Draws sides next to each other, or prints them one after the other without a live or wide enough terminal.

    At the end the terminal is restored, and every turn is printed with all texts.
    """

    def __init__(self, sides: Sequence[Side], terminal: Terminal) -> None:
        self._sides, self._terminal = sides, terminal
        self._title = self._prompt = self._parted = ""
        self._said: list[Group] = []
        self._live = None
        if terminal.live and not terminal.quiet and terminal.console.width >= _MIN_WIDTH * len(sides):
            self._live = Frames(self, terminal.console, FRAME_S, screen=True)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()
            save_picture(self._terminal, self)
            for verdict in self._said:
                self._terminal.console.print(verdict)

    def start_turn(self, title: str, prompt: str) -> None:
        """Show that a turn begins."""
        self._title, self._prompt = title, prompt
        if not self._live:
            self._terminal.note(f"[{self._title}] {self._prompt}", style="cyan")

    def draw(self, now: bool = False) -> None:
        """Redraw all sides, if the last frame is old enough."""
        if self._live:
            self._live.draw(now)

    def end_reading(self) -> None:
        """Show that all have read the text before the questions."""
        self.draw(now=True)
        if self._live:
            self._said.append(Group(self._heading(), Text()))

    def end_turn(self) -> None:
        """Show that all have replied."""
        self.draw(now=True)
        common = common_prefix(self._sides)
        differ = any(len(side.text) > common for side in self._sides)
        place = f"after {common:,} character{'' if common == 1 else 's'}"
        line = f"the replies differ {place}" if differ else "the replies are identical"
        if differ and not self._parted:
            self._parted = f"the texts part in {self._title.partition('/')[0]} {place}"
        if self._live:
            self._said.append(self._turn(line))
            return
        for side in self._sides:
            if side.turn is not None:
                note_recalled(self._terminal, Recalled(side.turn.recalled))
                self._terminal.reply(f"{side.loaded.title}: {side.text}\n")
                self._terminal.note(turn_line(side.turn), style="dim")
        self._terminal.note(line, style="dim")

    def print_verdict(self) -> None:
        """Print the course of every side to one scale, and the comparison in one line."""
        if not self._terminal.quiet:
            console = self._terminal.console
            lines = draw_timelines(
                [side.report.timeline for side in self._sides], min(console.width, 100), 3, self._sides[0].context
            )
            for side, drawn in zip(self._sides, lines, strict=True):
                console.print(Group(Text(side.policy, "bold"), *drawn))
        for side in self._sides:
            self._terminal.note(
                f"{side.policy}: {side.report.seen:,} tokens seen, {format_speed(side.report.total.decode_tok_s)}, "
                f"cache {format_bytes(side.report.cache_bytes)}"
            )
            if side.turn is not None and side.turn.detail:
                self._terminal.error(f"{side.policy}: {side.turn.detail}")
        self._terminal.note(verdict(self._sides, self._parted), style="bold")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or console.height
        question = list(self._heading().wrap(console, options.max_width))
        room = max(height // 5, 1)
        if len(question) > room:
            del question[room:]
            question[-1].truncate(options.max_width - 1)
            question[-1].append("…")
        width = options.max_width // len(self._sides)
        rows = min(max((height - 16) // 8, 1), 4)
        courses = draw_timelines(
            [side.report.timeline for side in self._sides], width - 4, rows, self._sides[0].context
        )
        layout = Layout()
        layout.split_column(Layout(Text("\n").join(question), size=max(len(question), 1)), Layout(name="sides"))
        layout["sides"].split_row(
            *(
                Layout(self._pane(console, side, width, height - len(question), course))
                for side, course in zip(self._sides, courses, strict=True)
            )
        )
        yield layout

    def _pane(self, console: Console, side: Side, width: int, height: int, course: list[Text]) -> Panel:
        status = [*self._status(side, width - 4), *course] if side.last is not None else []
        room = max(height - 2 - len(status), 1)
        lines = self._reply(side).wrap(console, width - 4)[-room:]
        lines += [Text()] * (room - len(lines))
        return Panel(Text("\n").join([*lines, *status]), title=Text(_shortened(side, width - 6)))

    def _heading(self) -> Text:
        return Text(f"[{self._title}] {' '.join(self._prompt.split())}" if self._title else "starting", "cyan")

    def _turn(self, line: str) -> Group:
        """A turn as it stays: the question, then all replies next to each other."""
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        for _ in self._sides:
            table.add_column(ratio=1, overflow="fold")
        table.add_row(*(Text(side.policy, "bold") for side in self._sides))
        table.add_row(*(self._reply(side) for side in self._sides))
        table.add_row(*(Text(turn_line(side.turn) if side.turn else "", "dim") for side in self._sides))
        return Group(self._heading(), table, Text(f"{line}\n", "dim"))

    def _reply(self, side: Side) -> Text:
        """The reply of a side, marked from where it differs from another."""
        if isinstance(side.last, PrefillProgress) and side.turn is None and not side.text:
            return Text(f"reading {side.last.done:,} of {side.last.total:,} tokens", "dim")
        common = common_prefix(self._sides)
        shown = Text(side.text[:common])
        if all(len(other.text) > common for other in self._sides):
            shown.append("≠", "bold reverse yellow").append(side.text[common:], "yellow")
        else:
            shown.append(side.text[common:])
        if side.turn is not None and side.turn.finish != "stop":
            shown.append(f" [{side.turn.finish}]", "bold red")
        return shown

    def _status(self, side: Side, width: int) -> list[Text]:
        assert side.last is not None
        counts = side.last.counts
        bar = slot_bar(counts, width) or context_bar(counts, side.context, width)
        over = not counts.window and side.context is not None and counts.seen > side.context
        total = side.report.total
        speed = format_speed(total.decode_tok_s) if total.new_tokens else f"reads {format_speed(total.prefill_tok_s)}"
        figures = f"{speed} · cache {format_bytes(counts.nbytes)}"
        if over and len(f"{figures} · past its context") <= width:
            figures += " · past its context"
        line = Text(figures, "bold red" if over else "bold")
        line.truncate(width, overflow="ellipsis")
        return [colored(bar), *_packed(legend(counts, side.context), width), line]


def _shortened(side: Side, width: int) -> str:
    """The title of a side, without its last parts if they do not fit, but always with the policy."""
    parts = side.loaded.title.split(" · ")
    while len(parts) > 1 and len(" · ".join(parts)) > width:
        parts.pop()
    return " · ".join(parts) if side.policy in parts else side.policy


def _packed(items: Sequence[tuple[str, str]], width: int) -> list[Text]:
    """Colored texts in as few lines as they fit into, none of them broken."""
    lines = [Text()]
    for color, text in items:
        if lines[-1] and len(lines[-1]) + 1 + len(text) > width:
            lines.append(Text())
        lines[-1].append(" " if lines[-1] else "").append(text, color)
    return lines
