"""Two policies side by side on the same turns and the same seed: where they part, how fast each is, what it holds."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice, takewhile
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.layout import Layout
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from h2o_stream.config import CacheConfig, Settings
from h2o_stream.engine.events import Finish, PrefillProgress, Token
from h2o_stream.session.questions import QuestionSet
from h2o_stream.session.records import Records
from h2o_stream.session.report import RunReport
from h2o_stream.session.turn import Turn
from h2o_stream.ui.figures import bar, size, speed, turn_line
from h2o_stream.ui.screen import FRAME_S
from h2o_stream.ui.start import Started, started
from h2o_stream.ui.terminal import Terminal

Event = PrefillProgress | Token | Turn


class Side:
    """One of the two.

    Attributes:
        title: model, policy and window.
        text: of the reply so far.
        finish: why it has ended for good; None while it goes on.
        report: figures so far.
    """

    def __init__(self, ready: Started) -> None:
        self.ready, self.title = ready, ready.title
        self.text = ""
        self.turn: Turn | None = None
        self.finish: Finish | None = None
        self.report = RunReport()
        self.last: Event | None = None

    def say(self, prompt: str) -> Iterator[Event]:
        """One turn of this side; nothing once it has ended."""
        self.text, self.turn = "", None
        if self.finish is not None:
            return
        for event in self.ready.conversation.say(prompt):
            self.report.observe(event)
            self.last = event
            if isinstance(event, Token):
                self.text += event.text
            elif isinstance(event, Turn):
                self.turn = event
                if event.finish in ("context", "oom", "interrupted"):
                    self.finish = event.finish
            yield event


def compare_policies(
    settings: Settings,
    policies: Sequence[str],
    questions: QuestionSet,
    turns: int | None,
    loop: bool,
    terminal: Terminal,
    records: Records,
) -> Finish | None:
    """Say every turn to both, token by token in turn.

    Args:
        settings: of both conversations, but for the policy.
        policies: two of them.
        questions: what is said.
        turns: end after so many turns; None is all of them.
        loop: start over after the last question.
        terminal: where it is shown.
        records: gets a record for each run and for each turn of each.

    Returns:
        Why it ended early, or None.
    """
    seed = settings.sampling.seed if settings.sampling.seed is not None else secrets.randbits(32)
    with ExitStack() as stack:
        sides = [
            Side(stack.enter_context(started("h2o-stream", _of(settings, policy, seed), terminal, records)))
            for policy in policies
        ]
        panes = Panes(sides, terminal)
        stack.enter_context(panes)
        interrupts = sides[0].ready.interrupts
        for side in sides[1:]:
            side.ready.conversation.engine.should_stop = interrupts
        stack.enter_context(interrupts)
        total = str(turns or ("∞" if loop else questions.turns))
        for number, (question, prompt) in enumerate(islice(questions.replay(loop), turns), 1):
            panes.asked(f"turn {number}/{total} · {question.category} #{question.id}", prompt)
            going = [side.say(prompt) for side in sides]
            while going:
                going = [events for events in going if next(events, None) is not None]
                panes.draw()
            panes.answered()
            for side, policy in zip(sides, policies, strict=True):
                if side.turn is not None:
                    records.write(side.turn.record(question.id) | {"policy": policy})
            if any(side.finish == "interrupted" for side in sides) or all(side.finish for side in sides):
                break
    for side, policy in zip(sides, policies, strict=True):
        records.write(side.report.record() | {"policy": policy})
        total_work = side.report.total
        terminal.note(
            f"{policy}: {side.report.seen:,} tokens seen, {speed(total_work.decode_tok_s)}, "
            f"cache {size(side.report.cache_bytes)}"
        )
        if side.turn is not None and side.turn.detail:
            terminal.error(f"{policy}: {side.turn.detail}")
    return next((side.finish for side in sides if side.finish), None)


class Panes:
    """Draws two sides next to each other, or writes one after the other where nothing can be drawn.

    Args:
        sides: two.
        terminal: where.
    """

    def __init__(self, sides: Sequence[Side], terminal: Terminal) -> None:
        self._sides, self._terminal = sides, terminal
        self._title = self._prompt = ""
        self._drawn_at = 0.0
        self._live = None
        if terminal.live and not terminal.quiet:
            self._live = Live(self, console=terminal.console, screen=True, auto_refresh=False)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def asked(self, title: str, prompt: str) -> None:
        """A turn begins."""
        self._title, self._prompt = title, prompt
        if not self._live:
            self._terminal.note(f"[{self._title}] {self._prompt}", style="cyan")

    def draw(self, now: bool = False) -> None:
        """Show how far both have come, now and then."""
        if self._live and (now or time.monotonic() - self._drawn_at >= FRAME_S):
            self._live.refresh()
            self._drawn_at = time.monotonic()

    def answered(self) -> None:
        """Both have replied."""
        self.draw(now=True)
        if self._live:
            return
        same = self._same()
        for side in self._sides:
            if side.turn is not None:
                self._terminal.reply(f"{side.title}: {side.text}\n")
                self._terminal.note(turn_line(side.turn), style="dim")
        parted = any(len(side.text) > same for side in self._sides)
        self._terminal.note(f"they part after {same:,} characters" if parted else "both say the same", style="dim")

    def _same(self) -> int:
        """How many characters both begin with."""
        pairs = zip(*(side.text for side in self._sides), strict=False)
        return len(list(takewhile(lambda pair: len(set(pair)) == 1, pairs)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or console.height
        prompt = Text(f"> {' '.join(self._prompt.split())}", "cyan", no_wrap=True, overflow="ellipsis")
        layout = Layout()
        layout.split_column(Layout(prompt, size=1), Layout(name="both"))
        layout["both"].split_row(
            *(Layout(self._pane(console, side, options.max_width // 2, height)) for side in self._sides)
        )
        yield layout

    def _pane(self, console: Console, side: Side, width: int, height: int) -> Panel:
        figures = self._figures(side, width - 4)
        room = max(height - 3 - len(figures), 1)
        lines = self._reply(side).wrap(console, width - 4)[-room:]
        lines += [Text()] * (room - len(lines))
        return Panel(Text("\n").join([*lines, *figures]), title=Text(side.title), subtitle=Text(self._title))

    def _reply(self, side: Side) -> Text:
        """What this side says, marked from where it differs from the other."""
        same = self._same()
        both_are_there = all(len(other.text) > same for other in self._sides)
        shown = Text(side.text[:same])
        if both_are_there:
            shown.append("≠", "bold reverse yellow").append(side.text[same:], "yellow")
        else:
            shown.append(side.text[same:])
        if side.turn is not None and side.turn.finish != "stop":
            shown.append(f" [{side.turn.finish}]", "bold red")
        return shown

    def _figures(self, side: Side, width: int) -> list[Text]:
        if side.last is None:
            return []
        counts, work = side.last.counts, side.report.total
        lines = [
            f"seen {counts.seen:,} kept {counts.cached:,}",
            f"{speed(work.decode_tok_s)} · cache {size(counts.nbytes)}",
        ]
        blocks = Text.assemble(*((text, color) for color, text in bar(counts, width)))
        return [
            *([blocks] if counts.window else []),
            *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines),
        ]


def _of(settings: Settings, policy: str, seed: int) -> Settings:
    """The settings with another policy; those parts of a policy that were given stay where the policy knows them."""
    cache = settings.cache if settings.cache.policy == policy else CacheConfig(policy, settings.cache.window)
    return replace(settings, cache=cache, sampling=replace(settings.sampling, seed=seed))
