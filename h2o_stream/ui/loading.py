"""How far loading has come: as a line of text, and drawn where nobody is typing meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from h2o_stream.progress import Progress, ProgressCallback
from h2o_stream.ui.figures import share, time_left
from h2o_stream.ui.terminal import Terminal, one_line

EVERY_S = 10.0
"""Between two lines where nothing can be drawn."""

_SHOWN_AFTER_S = 0.5
"""What is quicker needs no bar."""

_BAR = 4, 30
"""Least and most columns of the bar."""


class LoadingLine:
    """The latest progress, and the line that says so. Told from one thread, read from any.

    Args:
        model: its name, path or repository.
    """

    def __init__(self, model: str) -> None:
        self._name = one_line(PurePath(model).name or model)
        self._begun = time.monotonic()
        self._latest: Progress | None = None
        self._first = (self._begun, 0)

    def __call__(self, progress: Progress) -> None:
        """See `ProgressCallback`."""
        if self._latest is None or progress.what != self._latest.what:
            self._first = (time.monotonic(), progress.done)
        self._latest = progress

    def text(self, width: int) -> str:
        """What is going on, in at most `width` columns: words, a bar if it fits, the time left."""
        progress = self._latest
        if progress is None or progress.done >= progress.total:
            return f"Loading {self._name} ... {time.monotonic() - self._begun:.0f} s"[:width]
        layers = f"{progress.done}/{progress.total} layers"
        amount = layers if progress.what == "measuring" else share(progress.done, progress.total)
        start, end = f"{progress.what.capitalize()} {self._name}  {amount} ", self._left()
        least, most = _BAR
        room = min(width - len(start) - len(end), most)
        if room < least:
            return (start.rstrip() + end)[:width]
        filled = room * min(progress.done, progress.total) // max(progress.total, 1)
        return start + ("━" * filled + "╸")[:room].ljust(room) + end

    def _left(self) -> str:
        (since, before), progress = self._first, self._latest
        elapsed = time.monotonic() - since
        if progress is None or progress.done <= before or elapsed < 1:
            return ""
        return f"  {time_left((progress.total - progress.done) * elapsed / (progress.done - before))} left"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        waited = time.monotonic() - self._begun >= _SHOWN_AFTER_S and self._latest is not None
        yield Text(self.text(options.max_width - 1) if waited else "", no_wrap=True)


@contextmanager
def shown_loading(model: str, terminal: Terminal) -> Iterator[ProgressCallback]:
    """Draw what the yielded listener is told, until the block is left.

    On a live terminal that is a bar that goes away; elsewhere a line every ten seconds; nothing when quiet.
    """
    line = LoadingLine(model)
    if terminal.live and not terminal.quiet:
        with Live(line, console=terminal.console, transient=True, refresh_per_second=5):
            yield line
        return
    noted_at = time.monotonic()

    def listen(progress: Progress) -> None:
        nonlocal noted_at
        line(progress)
        if time.monotonic() - noted_at >= EVERY_S:
            noted_at = time.monotonic()
            terminal.note(line.text(terminal.console.width), style="dim")

    yield listen
