"""Two policies side by side, on the same turns with the same seed: where they differ, and how fast each is."""

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
from h2o_stream.recall.passage import Recalled
from h2o_stream.session.jsonl import JsonlWriter
from h2o_stream.session.messages import UserTurn, text_of
from h2o_stream.session.questions import QuestionSet
from h2o_stream.session.report import RunReport
from h2o_stream.session.turn import Turn
from h2o_stream.ui.format import format_bytes, format_speed, slot_bar, turn_line
from h2o_stream.ui.recall import note_recalled
from h2o_stream.ui.screen import FRAME_S
from h2o_stream.ui.start import LoadedConversation, open_conversation
from h2o_stream.ui.terminal import Terminal

Event = Recalled | PrefillProgress | Token | Turn


class Side:
    """The conversation of one policy.

    Attributes:
        loaded: the conversation.
        text: the reply so far.
        turn: the last turn; None while it is generated.
        finish: why the conversation ended; None while it continues.
        report: statistics so far.
        last: the last event with counts.
    """

    def __init__(self, loaded: LoadedConversation) -> None:
        self.loaded = loaded
        self.text = ""
        self.turn: Turn | None = None
        self.finish: Finish | None = None
        self.report = RunReport()
        self.last: PrefillProgress | Token | Turn | None = None

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


def compare_policies(
    settings: Settings,
    policies: Sequence[str],
    questions: QuestionSet,
    turns: int | None,
    loop: bool,
    terminal: Terminal,
    jsonl: JsonlWriter,
) -> Finish | None:
    """Ask both policies every turn, alternating token by token.

    Args:
        settings: of both conversations, except for the policy.
        policies: two of them.
        questions: to ask.
        turns: stop after this many turns; None for all.
        loop: start over after the last question.
        terminal: where it is shown.
        jsonl: receives the records of both runs and their turns.

    Returns:
        Why it ended early, or None.
    """
    seed = settings.sampling.seed if settings.sampling.seed is not None else secrets.randbits(32)
    with ExitStack() as stack:
        sides = [
            Side(
                stack.enter_context(
                    open_conversation("h2o-stream", _with_policy(settings, policy, seed), terminal, jsonl)
                )
            )
            for policy in policies
        ]
        questions.check(sides[0].loaded.conversation.metadata.template)
        panes = Panes(sides, terminal)
        stack.enter_context(panes)
        interrupts = sides[0].loaded.interrupts
        for side in sides[1:]:
            side.loaded.conversation.engine.should_stop = interrupts
        stack.enter_context(interrupts)
        total = str(turns or ("∞" if loop else questions.turns))
        for number, (question, prompt) in enumerate(islice(questions.prompts(loop), turns), 1):
            panes.start_turn(f"turn {number}/{total} · {question.category} #{question.id}", text_of(prompt))
            replies = [side.say(prompt) for side in sides]
            while replies:
                replies = [events for events in replies if next(events, None) is not None]
                panes.draw()
            panes.end_turn()
            for side, policy in zip(sides, policies, strict=True):
                if side.turn is not None:
                    jsonl.write(side.turn.record(question.id) | {"policy": policy})
            if any(side.finish == "interrupted" for side in sides) or all(side.finish for side in sides):
                break
    for side, policy in zip(sides, policies, strict=True):
        jsonl.write(side.report.record() | {"policy": policy})
        terminal.note(
            f"{policy}: {side.report.seen:,} tokens seen, {format_speed(side.report.total.decode_tok_s)}, "
            f"cache {format_bytes(side.report.cache_bytes)}"
        )
        if side.turn is not None and side.turn.detail:
            terminal.error(f"{policy}: {side.turn.detail}")
    return next((side.finish for side in sides if side.finish), None)


class Panes:
    """Draws two sides next to each other, or prints them one after the other without a live terminal.

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

    def start_turn(self, title: str, prompt: str) -> None:
        """Show that a turn begins."""
        self._title, self._prompt = title, prompt
        if not self._live:
            self._terminal.note(f"[{self._title}] {self._prompt}", style="cyan")

    def draw(self, now: bool = False) -> None:
        """Redraw both sides, if the last frame is old enough."""
        if self._live and (now or time.monotonic() - self._drawn_at >= FRAME_S):
            self._live.refresh()
            self._drawn_at = time.monotonic()

    def end_turn(self) -> None:
        """Show that both have replied."""
        self.draw(now=True)
        if self._live:
            return
        common = self._common_prefix()
        for side in self._sides:
            if side.turn is not None:
                note_recalled(self._terminal, side.turn.recalled)
                self._terminal.reply(f"{side.loaded.title}: {side.text}\n")
                self._terminal.note(turn_line(side.turn), style="dim")
        differ = any(len(side.text) > common for side in self._sides)
        line = f"the replies differ after {common:,} characters" if differ else "the replies are identical"
        self._terminal.note(line, style="dim")

    def _common_prefix(self) -> int:
        """Length of the common prefix of both replies."""
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
        status = self._status(side, width - 4)
        room = max(height - 3 - len(status), 1)
        lines = self._reply(side).wrap(console, width - 4)[-room:]
        lines += [Text()] * (room - len(lines))
        return Panel(Text("\n").join([*lines, *status]), title=Text(side.loaded.title), subtitle=Text(self._title))

    def _reply(self, side: Side) -> Text:
        """The reply of a side, marked from where it differs from the other."""
        common = self._common_prefix()
        shown = Text(side.text[:common])
        if all(len(other.text) > common for other in self._sides):
            shown.append("≠", "bold reverse yellow").append(side.text[common:], "yellow")
        else:
            shown.append(side.text[common:])
        if side.turn is not None and side.turn.finish != "stop":
            shown.append(f" [{side.turn.finish}]", "bold red")
        return shown

    def _status(self, side: Side, width: int) -> list[Text]:
        if side.last is None:
            return []
        counts = side.last.counts
        lines = [
            f"seen {counts.seen:,} kept {counts.cached:,}",
            f"{format_speed(side.report.total.decode_tok_s)} · cache {format_bytes(counts.nbytes)}",
        ]
        blocks = Text.assemble(*((text, color) for color, text in slot_bar(counts, width)))
        return [
            *([blocks] if counts.window else []),
            *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines),
        ]


def _with_policy(settings: Settings, policy: str, seed: int) -> Settings:
    """The settings for a policy. A policy other than the configured one uses its own defaults and the same window."""
    cache = settings.cache if settings.cache.policy == policy else CacheConfig(policy, settings.cache.window)
    return replace(settings, cache=cache, sampling=replace(settings.sampling, seed=seed))
