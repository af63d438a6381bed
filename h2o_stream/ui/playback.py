"""Plays back a recorded run at its original pace, without the model."""

from __future__ import annotations

import time
from pathlib import Path

from h2o_stream.session.recording import TurnStart, read_recording
from h2o_stream.ui.screen import PlainView, open_view
from h2o_stream.ui.terminal import Terminal


def play(path: Path, pace: float, terminal: Terminal) -> None:
    """Play back a recording.

    Args:
        path: of the recording.
        pace: speed relative to the original run.
        terminal: where it is shown.

    Raises:
        DataError: it is not a recording.
    """
    title, events = read_recording(path)
    view = open_view(terminal, title)
    if isinstance(view, PlainView):
        terminal.note(title, style="dim")
    started = time.monotonic()
    with view:
        for at_s, event in events:
            time.sleep(max(started + at_s / pace - time.monotonic(), 0.0))
            if isinstance(event, TurnStart):
                view.start_turn(event.title, event.prompt)
            else:
                view.add_event(event)
