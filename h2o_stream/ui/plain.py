"""Plain output of a run: replies go to stdout, a line before and after each to stderr."""

from __future__ import annotations

from typing import Self

from h2o_stream.engine.events import PrefillProgress, Token
from h2o_stream.session.turn import Turn
from h2o_stream.ui.format import turn_line
from h2o_stream.ui.terminal import PrefillStatus, Terminal


class PlainView:
    """Writes a run as plain text."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._status = PrefillStatus(terminal)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._status.close()

    def start_turn(self, title: str, prompt: str) -> None:
        """Show that a turn begins."""
        self._terminal.note(f"[{title}] {prompt}", style="cyan")

    def add_event(self, event: PrefillProgress | Token | Turn) -> None:
        """Show an event of the turn."""
        if isinstance(event, PrefillProgress):
            self._status.show(event.done, event.total)
        elif isinstance(event, Token):
            self._terminal.reply(event.text)
        else:
            self._status.close()
            self._terminal.reply("\n")
            self._terminal.note(turn_line(event), style="dim")
