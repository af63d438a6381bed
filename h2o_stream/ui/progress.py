"""Progress of long comparisons."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from h2o_stream.ui.terminal import Terminal


def progress_bars(terminal: Terminal) -> Progress:
    """A context manager of bars; silent where nobody is watching."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=terminal.console,
        disable=terminal.quiet or not terminal.live,
    )
