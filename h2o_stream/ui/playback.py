"""Shows a recorded run again, at its own pace, without the model."""

from __future__ import annotations

import time
from pathlib import Path

from h2o_stream.session.recording import Asked, recorded
from h2o_stream.ui.plain import PlainView
from h2o_stream.ui.screen import Screen
from h2o_stream.ui.terminal import Terminal


def play(path: Path, pace: float, terminal: Terminal) -> None:
    """Show what was recorded.

    Args:
        path: of the recording.
        pace: how many times as fast as it was.
        terminal: where it is shown.

    Raises:
        DataError: it is no recording.
    """
    title, events = recorded(path)
    view: Screen | PlainView = PlainView(terminal)
    if terminal.live and not terminal.quiet:
        view = Screen(terminal, title, None)
    else:
        terminal.note(title, style="dim")
    begun = time.monotonic()
    with view:
        for at_s, event in events:
            time.sleep(max(begun + at_s / pace - time.monotonic(), 0.0))
            if isinstance(event, Asked):
                view.asked(event.title, event.prompt)
            else:
                view.event(event)
