"""A stream without a terminal to draw on: replies to stdout, one line before and after each to stderr."""

from __future__ import annotations

from typing import Self

from h2o_stream.engine.events import PrefillProgress, Token
from h2o_stream.session.turn import Turn
from h2o_stream.ui.figures import turn_line
from h2o_stream.ui.terminal import Reading, Terminal


class PlainView:
    """Writes a replay as plain text."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._reading = Reading(terminal)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._reading.close()

    def asked(self, title: str, prompt: str) -> None:
        """A turn begins."""
        self._terminal.note(f"[{title}] {prompt}", style="cyan")

    def event(self, event: PrefillProgress | Token | Turn) -> None:
        """Something happened in the turn."""
        if isinstance(event, PrefillProgress):
            self._reading.show(event.done, event.total)
        elif isinstance(event, Token):
            self._terminal.reply(event.text)
        else:
            self._reading.close()
            self._terminal.reply("\n")
            self._terminal.note(turn_line(event), style="dim")
