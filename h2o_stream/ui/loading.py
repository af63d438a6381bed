"""The progress of loading: as a line of text, and drawn while nothing is being typed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from h2o_stream.base.progress import Progress, ProgressCallback
from h2o_stream.ui.format import format_duration, format_share
from h2o_stream.ui.terminal import Terminal, one_line

EVERY_S = 10.0
"""Between two lines without a live terminal."""

_SHOWN_AFTER_S = 0.5
"""Faster loading shows no bar."""

_MIN_BAR, _MAX_BAR = 4, 30
"""Columns of the bar."""


class LoadingLine:
    """The latest progress as a line. Updated by one thread, read by any."""

    def __init__(self, model: str) -> None:
        self._name = one_line(PurePath(model).name or model)
        self._started = time.monotonic()
        self._latest: Progress | None = None
        self._first = (self._started, 0)

    def __call__(self, progress: Progress) -> None:
        """Draw how far the loading is."""
        if self._latest is None or progress.what != self._latest.what:
            self._first = (time.monotonic(), progress.done)
        self._latest = progress

    def text(self, width: int) -> str:
        """The progress in at most `width` columns: what is done, a bar if it fits, the time left."""
        progress = self._latest
        if progress is None or progress.done >= progress.total:
            return f"Loading {self._name} ... {time.monotonic() - self._started:.0f} s"[:width]
        layers = f"{progress.done}/{progress.total} layers"
        amount = layers if progress.what == "measuring" else format_share(progress.done, progress.total)
        start, end = f"{progress.what.capitalize()} {self._name}  {amount} ", self._time_left()
        room = min(width - len(start) - len(end), _MAX_BAR)
        if room < _MIN_BAR:
            return (start.rstrip() + end)[:width]
        filled = room * min(progress.done, progress.total) // max(progress.total, 1)
        return start + ("━" * filled + "╸")[:room].ljust(room) + end

    def _time_left(self) -> str:
        (since, before), progress = self._first, self._latest
        elapsed = time.monotonic() - since
        if progress is None or progress.done <= before or elapsed < 1:
            return ""
        return f"  {format_duration((progress.total - progress.done) * elapsed / (progress.done - before))} left"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        waited = time.monotonic() - self._started >= _SHOWN_AFTER_S and self._latest is not None
        yield Text(self.text(options.max_width - 1) if waited else "", no_wrap=True)


@contextmanager
def show_loading(model: str, terminal: Terminal) -> Iterator[ProgressCallback]:
    """Show the progress that the yielded listener receives, until the block is left.

    A live terminal shows a transient bar, others a line every ten seconds, and quiet ones nothing.
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
